// Counter-based random numbers: Philox 4x32-10 (Salmon et al. 2011). The same (key, counter) gives the
// same bits on every backend, in any order, from any thread.
#pragma once

#include <cstdint>

#include "xmlc/platform.h"

namespace xmlc {

struct RandomKey {
  std::uint32_t low, high;
};

template <class Word>
struct RandomWords {
  Word word[4];
};

XMLC_HOST_DEVICE std::uint64_t mix(std::uint64_t value) {  // the finalizer of SplitMix64: a bijection
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// What random numbers are for: draws of one purpose say nothing about those of another.
enum class Purpose : std::uint64_t {
  kRounding = 1,
  kRedistribution = 2,
  kFirstMoment = 3,
  kSecondMoment = 4
};

// One independent stream for each (seed, step, purpose).
XMLC_HOST_DEVICE RandomKey make_key(std::uint64_t seed, std::uint64_t step, Purpose purpose) {
  const std::uint64_t mixed = mix(mix(mix(seed) ^ step) ^ static_cast<std::uint64_t>(purpose));
  return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)};
}

XMLC_HOST_DEVICE void multiply_wide(std::uint32_t a, std::uint32_t b, std::uint32_t& high,
                                    std::uint32_t& low) {
  const std::uint64_t product = static_cast<std::uint64_t>(a) * b;
  high = static_cast<std::uint32_t>(product >> 32);
  low = static_cast<std::uint32_t>(product);
}

template <class Word>
XMLC_HOST_DEVICE RandomWords<Word> philox(RandomKey key, Word c0, Word c1, Word c2, Word c3) {
  std::uint32_t k0 = key.low, k1 = key.high;
  for (int round = 0; round < 10; ++round) {
    Word high0, low0, high1, low1;
    multiply_wide(Word(0xd2511f53u), c0, high0, low0);
    multiply_wide(Word(0xcd9e8d57u), c2, high1, low1);
    c0 = high1 ^ c1 ^ Word(k0);
    c2 = high0 ^ c3 ^ Word(k1);
    c1 = low1;
    c3 = low0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// The random words of the weights of one label: connection k takes word (k / kWordLanes) % 4 of the call
// with this counter, where lane = k % kWordLanes and chunk = k / (4 * kWordLanes).
constexpr int kWordLanes = 16;
template <class Word>
XMLC_HOST_DEVICE RandomWords<Word> weight_words(RandomKey key, std::uint64_t label, std::uint32_t chunk,
                                                Word lane) {
  return philox(key, Word(static_cast<std::uint32_t>(label)), Word(static_cast<std::uint32_t>(label >> 32)),
                Word(chunk), lane);
}

// Uniform in [0, bound) from 64 random bits; the bias is below bound / 2^32 of a unit.
XMLC_HOST_DEVICE std::uint32_t bounded(std::uint64_t random, std::uint32_t bound) {
  const std::uint64_t high = random >> 32, low = random & 0xffffffffu;
  return static_cast<std::uint32_t>((high * bound + ((low * bound) >> 32)) >> 32);
}

}  // namespace xmlc
