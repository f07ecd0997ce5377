// Paged caches of decode_block. Each row of the stream is the new token of one sequence.
#pragma once

#include <cstring>
#include <vector>

#include "../cpu/flash_attention.h"
#include "decode_block_options.h"

namespace foundry {

// Checks on any device; does not read values.
inline void check_block_pages(const Tensor& k_cache, const c10::SymInt& n_rows, const BlockOptions& options) {
  TORCH_CHECK_VALUE(options.lengths.has_value(), "block_table must come with lengths");
  const Tensor &table = *options.block_table, &lengths = *options.lengths;
  TORCH_CHECK_VALUE(
      table.dim() == 2 && lengths.dim() == 1 && table.sym_size(0) == n_rows && lengths.sym_size(0) == n_rows,
      "block_table must be [N, columns] and lengths [N], N being the ", n_rows, " rows of stream; got ",
      table.sym_sizes(), " and ", lengths.sym_sizes());
  TORCH_CHECK_TYPE(table.scalar_type() == at::kInt && lengths.scalar_type() == at::kInt,
                   "block_table and lengths must be int32");
  TORCH_CHECK_VALUE(options.start == 0, "start must be 0 where block_table is given; got ", options.start);
  TORCH_CHECK_VALUE(k_cache.sym_size(1) > 0, "pages must have positions; k_cache is ", k_cache.sym_sizes());
}

class BlockPages {
 public:
  // Without a block_table there are no pages. Otherwise checks the page indices of all sequences.
  BlockPages(const BlockOptions& options, const Tensor& k_cache, int64_t n_positions) {
    if (!options.block_table) return;
    table_ = options.block_table->contiguous();
    const Tensor lengths = options.lengths->contiguous();
    const int64_t columns = table_.size(1), n_pages = k_cache.size(0);
    pages_ = {table_.const_data_ptr<int32_t>(), columns, k_cache.size(1)};
    for (int64_t n = 0; n < lengths.numel(); ++n) {
      const int64_t length = lengths.const_data_ptr<int32_t>()[n];
      TORCH_CHECK_VALUE(length > 0 && length <= std::min(columns * pages_.size, n_positions),
                        "lengths must be in 1 .. ", std::min(columns * pages_.size, n_positions),
                        ", what block_table's pages and the rows of cos hold; got ", length, " for sequence ", n);
      for (int64_t i = 0; i * pages_.size < length; ++i) {
        const int64_t page = pages_.table[n * columns + i];
        TORCH_CHECK_VALUE(page >= 0 && page < n_pages, "block_table must be in 0 .. ", n_pages - 1, "; got ", page,
                          " for page ", i, " of sequence ", n);
      }
      positions_.push_back(static_cast<int32_t>(length - 1));
    }
  }

  explicit operator bool() const { return pages_.table != nullptr; }
  const AttentionPages& pages() const { return pages_; }

  // The positions of the sequences' new tokens.
  const std::vector<int32_t>& positions() const { return positions_; }

  // Copies the new row of each sequence into a cache. Rows are row_bytes apart.
  void store(const char* rows, int64_t row_bytes, const Tensor& cache) const {
    const int64_t position_bytes = cache.stride(1) * cache.element_size();
    for (size_t n = 0; n < positions_.size(); ++n) {
      const int64_t page = pages_.table[int64_t(n) * pages_.stride + positions_[n] / pages_.size];
      std::memcpy(static_cast<char*>(cache.mutable_data_ptr()) +
                      (page * pages_.size + positions_[n] % pages_.size) * position_bytes,
                  rows + int64_t(n) * row_bytes, position_bytes);
    }
  }

 private:
  Tensor table_;
  AttentionPages pages_{};
  std::vector<int32_t> positions_;
};

}  // namespace foundry
