// The loop without checks that benchmarks/reader.py compares the strict parser with: it takes XMC text for
// right. No range, order, number or line is checked, and a number is its digits times a power of ten.
#include <cstdint>

namespace {

std::int64_t whole(const char*& at) {
  std::int64_t number = 0;
  for (; *at >= '0' && *at <= '9'; ++at) number = number * 10 + (*at - '0');
  return number;
}

float decimal(const char*& at) {
  const bool negative = *at == '-';
  at += negative;
  double number = static_cast<double>(whole(at));
  if (*at == '.') {
    const char* start = ++at;
    double scale = 1;
    const double behind = static_cast<double>(whole(at));
    for (; start < at; ++start) scale *= 10;
    number += behind / scale;
  }
  if (*at == 'e' || *at == 'E') {
    const bool down = *++at == '-';
    at += down || *at == '+';
    for (std::int64_t power = whole(at); power > 0; --power) number = down ? number / 10 : number * 10;
  }
  return static_cast<float>(negative ? -number : number);
}

}  // namespace

// Reads whole lines between `text` and `end`; the arrays have room for all that can stand there.
extern "C" void read_lenient(const char* text, const char* end, std::int64_t* offsets, std::int32_t* indices,
                             float* values, std::int64_t* label_offsets, std::int32_t* labels) {
  std::int64_t pairs = 0, label = 0;
  *offsets++ = *label_offsets++ = 0;
  for (const char* at = text; at < end; ++at) {
    while (*at != ' ' && *at != '\n') {
      labels[label++] = static_cast<std::int32_t>(whole(at));
      at += *at == ',';
    }
    while (*at != '\n') {
      ++at;
      indices[pairs] = static_cast<std::int32_t>(whole(at));
      ++at;
      values[pairs++] = decimal(at);
    }
    *offsets++ = pairs;
    *label_offsets++ = label;
  }
}
