// Feeds changed corpus files to the native text parser, for ASan and UBSan (see scripts/fuzz_native): the
// text lies in a heap block of exactly its size, and so do the arrays, so that one byte too far is seen.
// Checks what is promised of the results. Guided by coverage: what takes the parser along an edge between two
// basic blocks that was not taken before, or taken less often, is changed further. The parser is compiled
// with -fsanitize-coverage=trace-pc, which GCC and clang know; `LLVMFuzzerTestOneInput` also links with
// libFuzzer
// (-DXMLC_LIBFUZZER, clang).
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "sparse_text.h"

namespace {

using namespace xmlc::cpu;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_sparse_text: %s\n", what);
  std::abort();
}

template <class T>
std::unique_ptr<T[]> room(std::int64_t count) {
  return std::make_unique<T[]>(static_cast<std::size_t>(count));
}

// Parses as the reader does, and takes one line out where the parser stops.
void parse(const char* text, std::int64_t size, std::int64_t labels, std::int64_t first) {
  constexpr std::int64_t kColumns = 20;
  std::int64_t lines = 0;
  for (std::int64_t at = 0; at < size; ++at) lines += text[at] == '\n';
  const auto offsets = room<std::int64_t>(lines + 1), label_offsets = room<std::int64_t>(lines + 1);
  const auto indices = room<std::int32_t>(size / 4 + 1), label_indices = room<std::int32_t>(size / 2 + 1);
  const auto values = room<float>(size / 4 + 1);
  const SparseText all{text,
                       text + size,
                       kColumns,
                       first,
                       labels,
                       first,
                       offsets.get(),
                       indices.get(),
                       values.get(),
                       label_offsets.get(),
                       label_indices.get()};
  TextProgress progress;
  for (;;) {
    parse_sparse_text(all, progress);
    require(progress.lines <= lines && progress.at <= size, "came too far");
    if (progress.lines == lines) break;
    const void* newline = std::memchr(text + progress.at, '\n', static_cast<std::size_t>(size - progress.at));
    require(newline != nullptr, "stopped behind the last line");
    progress.at = static_cast<const char*>(newline) - text + 1;
    offsets[++progress.lines] = progress.pairs;
    label_offsets[progress.lines] = progress.labels;
  }
  require(progress.at == size && offsets[lines] == progress.pairs, "did not come to the end");
  for (std::int64_t pair = 0; pair < progress.pairs; ++pair) {
    require(indices[pair] >= 0 && indices[pair] < kColumns, "an index is out of range");
    require(std::isfinite(values[pair]), "a value is not finite");
  }
  for (std::int64_t label = 0; label < progress.labels; ++label)
    require(label_indices[label] >= 0 && label_indices[label] < labels, "a label is out of range");

  const auto pairs = room<std::int64_t>(2 * lines);
  TextProgress at;
  parse_index_pairs(text, text + size, 20, first, 20, first, pairs.get(), at);
  for (std::int64_t place = 0; place < 2 * at.pairs; ++place)
    require(pairs[place] >= 0 && pairs[place] < 20, "a pair is out of range");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto text = room<char>(static_cast<std::int64_t>(size) + 1);
  if (size > 0) std::memcpy(text.get(), data, size);
  text[size] = '\n';
  for (const std::int64_t labels : {-1, 0, 15})
    for (const std::int64_t first : {0, 1})
      parse(text.get(), static_cast<std::int64_t>(size) + 1, labels, first);
  return 0;
}

#if !defined(XMLC_LIBFUZZER)
namespace {

constexpr std::size_t kEdges = 1 << 16;
std::uint8_t times[kEdges];  // that this run took each edge
std::uint8_t seen[kEdges];   // one bit for each order of magnitude of that, over all runs
std::uintptr_t last_block = 0;

// Returns whether this run took an edge as no run before did, and forgets the run.
bool found_new() {
  bool found = false;
  for (std::size_t edge = 0; edge < kEdges; ++edge) {
    if (times[edge] == 0) continue;
    const auto magnitude = static_cast<std::uint8_t>(1u << (31 - __builtin_clz(times[edge])));
    found |= (seen[edge] & magnitude) == 0;
    seen[edge] |= magnitude;
    times[edge] = 0;
  }
  last_block = 0;
  return found;
}

}  // namespace

// Called by the parser at the start of every basic block.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto block = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  std::uint8_t& edge = times[(block ^ (last_block << 7)) % kEdges];
  edge = static_cast<std::uint8_t>(edge + (edge < 255));
  last_block = block;
}

int main(int count, char** arguments) {
  require(count > 2, "usage: fuzz_sparse_text SECONDS FILE...");
  std::vector<std::string> seeds;
  for (int each = 2; each < count; ++each) {
    std::ifstream file(arguments[each], std::ios::binary);
    require(file.good(), "a file of the corpus must be readable");
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const std::vector<std::string> tokens = {"0",
                                           "1",
                                           "19",
                                           "20",
                                           ":",
                                           ",",
                                           " ",
                                           "\t",
                                           "\n",
                                           "\r",
                                           ".",
                                           "-",
                                           "+",
                                           "e",
                                           "e-9",
                                           "1e39",
                                           "9999999999",
                                           "18446744073709551616",
                                           "9223372036854775808",
                                           "0.12345678901234567890",
                                           "nan",
                                           "1:1 ",
                                           std::string(1, '\0'),
                                           "\xff"};
  constexpr std::size_t kLongest = 4096, kMostKept = 4096;
  const std::size_t committed = seeds.size();
  for (const std::string& seed : seeds)
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(seed.data()), seed.size());
  require(found_new(), "the parser must be compiled with -fsanitize-coverage=trace-pc");
  std::mt19937_64 random(0);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[1]));
  std::int64_t runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    std::string text = seeds[random() % seeds.size()];
    for (std::uint64_t edit = random() % 6; edit-- > 0;) {
      const std::size_t at = random() % (text.size() + 1);
      text.replace(at, random() % 4, tokens[random() % tokens.size()]);
      if (random() % 8 == 0) text.resize(random() % (text.size() + 1));
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    if (found_new() && text.size() <= kLongest && seeds.size() < kMostKept) seeds.push_back(text);
  }
  std::printf("%lld texts, %zu of them took a new way\n", static_cast<long long>(runs),
              seeds.size() - committed);
}
#endif
