// Parses lines of `index:value` pairs, with or without a leading field of labels, and lines of index pairs.
#pragma once

#include <cstdint>

namespace xmlc::cpu {

// How far a parser has come in a text; the caller reads what it could not, and calls again.
struct TextProgress {
  std::int64_t at = 0;         // byte where the next line starts
  std::int64_t lines = 0;      // lines parsed
  std::int64_t pairs = 0;      // pairs stored
  std::int64_t labels = 0;     // labels stored
  std::int64_t unordered = 0;  // bit 0: columns, bit 1: labels of some line do not ascend strictly
};

// What is known of the lines and where they go. Indices are stored less `first_*`, and lie below `columns`
// and `labels`. Room: pairs for one in four bytes, labels for one in two, offsets for every line and one
// more.
struct SparseText {
  const char* text;
  const char* end;  // behind the newline that ends the text
  std::int64_t columns, first_column;
  std::int64_t labels, first_label;  // labels < 0: lines have no label field
  std::int64_t* offsets;             // [line + 1]
  std::int32_t* indices;             // [pair]
  float* values;                     // [pair]
  std::int64_t* label_offsets;       // [line + 1]
  std::int32_t* label_indices;       // [label]
};

// Parses whole lines from `progress` on, until the end or a line that is not plainly right.
void parse_sparse_text(const SparseText& lines, TextProgress& progress);

// Parses lines that are blank or hold two indices below `rows` and `columns`, stored in turn into `pairs`
// [2 * line] less their first; until the end or a line that is neither.
void parse_index_pairs(const char* text, const char* end, std::int64_t rows, std::int64_t first_row,
                       std::int64_t columns, std::int64_t first_column, std::int64_t* pairs,
                       TextProgress& progress);

}  // namespace xmlc::cpu
