// A cursor walks over a text that ends with a newline. No token spans lines, so every loop over the bytes of
// a token stops at the newline at the latest, and only reads of eight bytes look at the end. What is not
// plainly right is given up at the start of its line: the caller parses that line with care, and knows what
// to say of it.
#include "sparse_text.h"

#include <charconv>
#include <cmath>
#include <cstring>

namespace xmlc::cpu {
namespace {

constexpr std::int64_t kMostDigits = 10;   // of an index: all of int32, far from the end of int64
constexpr std::int64_t kWholeDigits = 19;  // do not wrap in 64 bits
// Mantissas and powers of ten up to these are exact in double, so that one operation rounds correctly.
constexpr std::uint64_t kExactMantissa = std::uint64_t{1} << 53;
constexpr int kExactPower = 22;
constexpr double kPowers[kExactPower + 1] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                             1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                             1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
constexpr double kOverflow = 0x1.ffffffp127;  // the least double that rounds to infinity in float

bool is_digit(char c) { return static_cast<unsigned char>(c - '0') < 10; }
bool is_blank(char c) { return c == ' ' || static_cast<unsigned char>(c - '\t') < 5; }  // as bytes.split

class Cursor {
 public:
  Cursor(const char* at, const char* end) : at_(at), end_(end) {}

  const char* at() const { return at_; }
  char look() const { return *at_; }
  bool take(char expected) {
    if (*at_ != expected) return false;
    ++at_;
    return true;
  }
  // Skips blanks within the line; returns whether a token follows.
  bool token_follows() {
    while (*at_ != '\n' && is_blank(*at_)) ++at_;
    return *at_ != '\n';
  }

  // Appends digits to `number`, which wraps after 19; returns how many there were.
  std::int64_t digits(std::uint64_t& number) {
    const char* start = at_;
    if (is_digit(at_[0]) && !is_digit(at_[1])) {  // as most values start; what follows a digit is in the text
      number = number * 10 + static_cast<unsigned>(*at_++ - '0');
      return 1;
    }
    while (end_ - at_ >= 8) {
      std::uint64_t word;
      std::memcpy(&word, at_, 8);
      const int count = leading_digits(word);
      if (count == 0) return at_ - start;
      number = number * kTens[count] + value_of(word, count);
      at_ += count;
      if (count < 8) return at_ - start;
    }
    for (; is_digit(*at_); ++at_) number = number * 10 + static_cast<unsigned>(*at_ - '0');
    return at_ - start;
  }

  // Reads a whole number in [first, first + limit), and stores it less `first`.
  bool index(std::int64_t first, std::int64_t limit, std::int64_t& out) {
    std::uint64_t number = 0;
    const std::int64_t count = digits(number);
    if (count == 0 || count > kMostDigits) return false;
    out = static_cast<std::int64_t>(number) - first;
    return out >= 0 && out < limit;
  }

  // Reads a decimal number that is finite in float, rounded to double and then to float.
  bool value(float& out) {
    const bool negative = *at_ == '-';
    at_ += negative || *at_ == '+';
    const char* start = at_;
    std::uint64_t mantissa = 0;
    std::int64_t count = digits(mantissa);
    std::int64_t power = 0;
    if (take('.')) {
      const std::int64_t behind = digits(mantissa);
      count += behind;
      power = -behind;
    }
    if (count == 0) return false;
    if (*at_ == 'e' || *at_ == 'E') {
      ++at_;
      const bool down = *at_ == '-';
      at_ += down || *at_ == '+';
      std::uint64_t exponent = 0;
      const std::int64_t length = digits(exponent);
      if (length == 0 || length > 9) return false;
      power += down ? -static_cast<std::int64_t>(exponent) : static_cast<std::int64_t>(exponent);
    }
    double exact;
    if (count <= kWholeDigits && mantissa <= kExactMantissa && power >= -kExactPower &&
        power <= kExactPower) {
      exact = static_cast<double>(mantissa);
      exact = power < 0 ? exact / kPowers[-power] : exact * kPowers[power];
    } else if (!from_text(start, exact)) {
      return false;
    }
    if (!(exact < kOverflow)) return false;
    out = static_cast<float>(negative ? -exact : exact);
    return true;
  }

 private:
  static constexpr std::uint64_t kTens[9] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

  // The first character is the lowest byte.
  static int leading_digits(std::uint64_t word) {
    // High bit of a byte: it is no digit. A carry leaves a byte only upwards, behind the first such one.
    const std::uint64_t other =
        ((word + 0x4646464646464646u) | (word - 0x3030303030303030u)) & 0x8080808080808080u;
    return other == 0 ? 8 : __builtin_ctzll(other) >> 3;
  }
  static std::uint64_t value_of(std::uint64_t word, int count) {
    word = (word - 0x3030303030303030u) << (64 - 8 * count);  // digits to the end, zeros before
    word = word * 10 + (word >> 8);
    return (((word & 0x000000ff000000ffu) * 0x000f424000000064u +
             ((word >> 16) & 0x000000ff000000ffu) * 0x0000271000000001u) >>
            32) &
           0xffffffffu;
  }

  bool from_text(const char* start, double& out) const {
#if defined(__cpp_lib_to_chars)
    const auto [stop, error] = std::from_chars(start, at_, out);
    return error == std::errc() && stop == at_;
#else
    return false;
#endif
  }

  const char* at_;
  const char* end_;
};

// Parses one line behind its newline; false where it is not plainly right, with anything in `progress`.
bool parse_line(const SparseText& lines, Cursor& cursor, TextProgress& progress) {
  std::int64_t index = 0, last = -1, last_label = -1;
  if (lines.labels >= 0 && !is_blank(cursor.look())) {
    const Cursor start = cursor;
    if (cursor.index(lines.first_label, lines.labels, index) && cursor.look() != ':') {
      for (;;) {
        progress.unordered |= index <= last_label ? 2 : 0;
        lines.label_indices[progress.labels++] = static_cast<std::int32_t>(last_label = index);
        if (!cursor.take(',')) break;
        if (!cursor.index(lines.first_label, lines.labels, index)) return false;
      }
      if (!is_blank(cursor.look())) return false;
    } else {
      cursor = start;
    }
  }
  while (cursor.token_follows()) {
    float value;
    if (!cursor.index(lines.first_column, lines.columns, index) || !cursor.take(':') ||
        !cursor.value(value) || !is_blank(cursor.look()))
      return false;
    progress.unordered |= index <= last ? 1 : 0;
    lines.indices[progress.pairs] = static_cast<std::int32_t>(last = index);
    lines.values[progress.pairs++] = value;
  }
  return cursor.take('\n');
}

}  // namespace

void parse_sparse_text(const SparseText& lines, TextProgress& progress) {
  Cursor cursor(lines.text + progress.at, lines.end);
  while (cursor.at() < lines.end) {
    TextProgress after = progress;
    if (!parse_line(lines, cursor, after)) return;
    after.at = cursor.at() - lines.text;
    ++after.lines;
    lines.offsets[after.lines] = after.pairs;
    if (lines.labels >= 0) lines.label_offsets[after.lines] = after.labels;
    progress = after;
  }
}

void parse_index_pairs(const char* text, const char* end, std::int64_t rows, std::int64_t first_row,
                       std::int64_t columns, std::int64_t first_column, std::int64_t* pairs,
                       TextProgress& progress) {
  Cursor cursor(text + progress.at, end);
  while (cursor.at() < end) {
    std::int64_t row, column;
    if (cursor.token_follows()) {
      if (!cursor.index(first_row, rows, row) || !is_blank(cursor.look()) || !cursor.token_follows() ||
          !cursor.index(first_column, columns, column) || !is_blank(cursor.look()) || cursor.token_follows())
        return;
      pairs[2 * progress.pairs] = row;
      pairs[2 * progress.pairs++ + 1] = column;
    }
    if (!cursor.take('\n')) return;
    progress.at = cursor.at() - text;
    ++progress.lines;
  }
}

}  // namespace xmlc::cpu
