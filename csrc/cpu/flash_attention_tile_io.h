// Copies rows of tensors, of any memory type, into tiles and back.
#pragma once

#include "dispatch.h"
#include "flash_attention_gemm.h"

namespace foundry {
namespace FK_ISA {

// Reads `n` elements as floats; zeros up to `padded`.
template <class T>
inline void widen(const T* in, int64_t n, float* out, int64_t padded) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Whole::store(out + i, Whole::load(in + i));
  if (i < n) Whole::store(out + i, Part{(int)(n - i)}.load(in + i)), i += kLanes;
  for (; i < padded; i += kLanes) Whole::store(out + i, Vec{});
}

template <class T>
inline void narrow(const float* in, int64_t n, T* out) {
  for_each_vec(n, [&](int64_t i, auto at, int) FK_INLINE { at.store(out + i, at.load(in + i)); });
}

// The offset of row token * group + head - first_head of a sequence's queries.
inline int64_t row_offset(const HeadStrides& strides, const AttentionSequence& s, int64_t first_head, int64_t group,
                          int64_t row) {
  return s.batch * strides.batch + (first_head + row % group) * strides.head +
         (s.q_start + row / group) * strides.token;
}

// The offset of a key or value.
inline int64_t key_offset(const HeadStrides& strides, const AttentionSequence& s, int64_t kv_head, int64_t key) {
  return s.batch * strides.batch + kv_head * strides.head + (s.k_start + key) * strides.token;
}

// Elements [offset, offset + n) of memory as E; zeros up to `lanes`.
template <class E>
inline void read_row(Dtype type, const void* data, int64_t offset, int64_t n, float* out, int64_t lanes) {
  if constexpr (kPer<E> == 2) {
    std::memcpy(out, static_cast<const E*>(data) + offset, n * sizeof(E));
    std::memset(reinterpret_cast<E*>(out) + n, 0, (2 * lanes - n) * sizeof(E));
  } else {
    with_type(type, [&](auto* t) { widen(static_cast<decltype(t)>(const_cast<void*>(data)) + offset, n, out, lanes); });
  }
}

// Rows of keys, values, queries or gradients.
template <class E> struct Tile {
  const E* data;
  int64_t ld;
};

// Rows [0, n) of memory with this stride: in place if they have type E and whole lanes, otherwise copied to `scratch`.
template <class E>
inline Tile<E> read_tile(Dtype type, const void* data, int64_t offset, int64_t stride, int64_t n, int64_t width,
                         float* scratch) {
  const bool is_e = type == (kPer<E> == 2 ? Dtype::bf16 : Dtype::f32);
  if (is_e && width % kPer<E> == 0) return {static_cast<const E*>(data) + offset, stride};
  const int64_t lanes = lanes_of<E>(width);
  for (int64_t i = 0; i < n; ++i) read_row<E>(type, data, offset + i * stride, width, scratch + i * lanes, lanes);
  return {reinterpret_cast<const E*>(scratch), lanes * kPer<E>};
}

// The offset of a key or value in a page.
inline int64_t key_offset_in_page(const AttentionInputs& a, const HeadStrides& strides, int64_t sequence,
                                  int64_t kv_head, int64_t key) {
  const int64_t position = a.sequences[sequence].k_start + key;
  const int64_t page = a.pages.table[sequence * a.pages.stride + position / a.pages.size];
  return page * strides.batch + kv_head * strides.head + position % a.pages.size * strides.token;
}

// Whether one page holds all keys [key, key + n).
inline bool in_one_page(const AttentionInputs& a, int64_t sequence, int64_t key, int64_t n) {
  return (a.sequences[sequence].k_start + key) % a.pages.size + n <= a.pages.size;
}

// Calls f(first, count, offset of the first) for the parts of keys [key, key + n), one per page.
template <class F>
inline void for_each_page(const AttentionInputs& a, const HeadStrides& strides, int64_t sequence, int64_t kv_head,
                          int64_t key, int64_t n, F&& f) {
  const int64_t position = a.sequences[sequence].k_start + key, size = a.pages.size;
  const int32_t* page = a.pages.table + sequence * a.pages.stride + position / size;
  int64_t in_page = position % size;  // divide once: pages may be small
  for (int64_t i = 0; i < n; ++page, in_page = 0) {
    const int64_t count = std::min(size - in_page, n - i);
    f(i, count, *page * strides.batch + kv_head * strides.head + in_page * strides.token);
    i += count;
  }
}

// read_tile of the keys or values [key, key + n): in place if one page holds them all.
template <class E>
inline Tile<E> read_paged_tile(const AttentionInputs& a, const void* data, const HeadStrides& strides, int64_t sequence,
                               int64_t kv_head, int64_t key, int64_t n, int64_t width, float* scratch) {
  if (in_one_page(a, sequence, key, n))
    return read_tile<E>(a.type, data, key_offset_in_page(a, strides, sequence, kv_head, key), strides.token, n, width,
                        scratch);
  const int64_t lanes = lanes_of<E>(width);
  for_each_page(a, strides, sequence, kv_head, key, n, [&](int64_t first, int64_t count, int64_t offset) {
    for (int64_t i = 0; i < count; ++i)
      read_row<E>(a.type, data, offset + i * strides.token, width, scratch + (first + i) * lanes, lanes);
  });
  return {reinterpret_cast<const E*>(scratch), lanes * kPer<E>};
}

}  // namespace FK_ISA
}  // namespace foundry
