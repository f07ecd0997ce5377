// Compiled once per instruction set (see isa.h).
#include "rope.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "dispatch.h"

namespace foundry {
namespace FK_ISA {

namespace {

// Lanes 1, 0, 3, 2, ...
inline Vec swap_neighbours(Vec v) {
#if defined(__AVX512F__)
  return (Vec)_mm512_permute_ps((__m512)v, 0xB1);
#elif defined(__AVX2__)
  return (Vec)_mm256_permute_ps((__m256)v, 0xB1);
#elif defined(__SSE2__)
  return (Vec)_mm_shuffle_ps((__m128)v, (__m128)v, 0xB1);
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = v[i ^ 1];
  return out;
#endif
}

// a * b + c, rounded once where the instruction set can. Left to the compiler, two copies of one loop may round
// different products first and so differ in the last bit.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// cos and sin of a few tokens of one sequence, in float and as `rotate` reads them. They are read once for all heads of
// q and k, and are few enough to stay in the L1 cache.
class TableBlock {
 public:
  TableBlock(const RopeTables& tables, bool interleaved, bool inverse)
      : tables_(tables),
        interleaved_(interleaved),
        sign_(inverse ? -1.0f : 1.0f),
        row_(round_up((interleaved ? 2 : 1) * tables.half)),
        capacity_(std::max<int64_t>(1, std::min<int64_t>(16, 2048 / row_))),
        memory_(row_ * (2 * capacity_ + 1) + kLanes) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.data());
    values_ = memory_.data() + (round_up(start / sizeof(float)) - start / sizeof(float));
  }

  int64_t capacity() const { return capacity_; }
  const float* cos(int64_t i) const { return values_ + 2 * row_ * i; }
  const float* sin(int64_t i) const { return cos(i) + row_; }

  void read(int64_t b, int64_t begin, int64_t end) {
    with_type(tables_.type, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = tables_.row(b, t);
        float* cos = values_ + 2 * row_ * (t - begin);
        widen(static_cast<const T*>(tables_.cos) + tables_.cos_offset(b, row), cos, 1.0f, 1.0f);
        widen(static_cast<const T*>(tables_.sin) + tables_.sin_offset(b, row), cos + row_, -sign_, sign_);
      }
    });
  }

 private:
  // Rows start at multiples of a register, so that no read crosses a cache line.
  static int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

  // Widens a row, times `odd`. Interleaved, both members of a pair get the value, the first of them times `even`.
  template <class T>
  void widen(const T* in, float* out, float even, float odd) {
    const int64_t half = tables_.half;
    float* values = interleaved_ ? values_ + 2 * row_ * capacity_ : out;
    for_each_vec(half,
                 [&](int64_t i, auto at, int) FK_INLINE { at.store(values + i, at.load(in + i)); });
    if (interleaved_) {
      for (int64_t i = 0; i < half; ++i) {
        out[2 * i] = values[i] * even;
        out[2 * i + 1] = values[i] * odd;
      }
    } else if (odd != 1.0f) {
      for (int64_t i = 0; i < half; ++i) out[i] *= odd;
    }
  }

  const RopeTables& tables_;
  const bool interleaved_;
  const float sign_;
  const int64_t row_, capacity_;
  std::vector<float> memory_;
  float* values_;
};

// Rotates one head of one token: `read(i, access)` gives input elements, `write(i, access, k, v)` takes results.
template <bool kInterleaved, class Read, class Write>
inline FK_INLINE void rotate(const float* cos, const float* sin, int64_t half, int64_t width,
                                                 Read&& read, Write&& write) {
  if constexpr (kInterleaved) {
    for_each_vec(2 * half, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec v = read(i, at);
      write(i, at, k, multiply_add(v, at.load(cos + i), swap_neighbours(v) * at.load(sin + i)));
    });
  } else {
    for_each_vec(half, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec a = read(i, at), b = read(half + i, at), c = at.load(cos + i), s = at.load(sin + i);
      write(i, at, k, multiply_add(a, c, -b * s));
      write(half + i, at, k, multiply_add(b, c, a * s));
    });
  }
  if (2 * half == width) return;
  for_each_vec(width - 2 * half, [&](int64_t i, auto at, int k) FK_INLINE {
    write(2 * half + i, at, k, read(2 * half + i, at));
  });
}

// Cuts the tokens [begin, end) of B * T into blocks of at most `most` tokens of one sequence, and calls
// f(batch, begin, end) for each.
template <class F>
void for_each_block(int64_t begin, int64_t end, int64_t n_tokens, int64_t most, F&& f) {
  while (begin < end) {
    const int64_t b = begin / n_tokens, t = begin % n_tokens;
    const int64_t count = std::min({most, n_tokens - t, end - begin});
    f(b, t, t + count);
    begin += count;
  }
}

// Calls f(head, token) for all heads of some tokens, in memory order.
template <class F>
inline FK_INLINE void for_each_row(const RopeStrides& strides, int64_t n_heads, int64_t begin,
                                                       int64_t end, F&& f) {
  const bool heads_first = strides.head < strides.token;
  const int64_t n_tokens = end - begin, n_outer = heads_first ? n_tokens : n_heads;
  const int64_t n_inner = heads_first ? n_heads : n_tokens;
  // One loop for both orders: f is inlined, and a second copy of it would double the time to compile this file.
  for (int64_t i = 0; i < n_outer; ++i)
    for (int64_t j = 0; j < n_inner; ++j) f(heads_first ? j : i, begin + (heads_first ? i : j));
}

// Whether an output is larger than the caches, and all its vectors are aligned as streaming stores need.
template <class T>
bool worth_streaming(const void* out, int64_t n_rows, int64_t width, int64_t half) {
  constexpr uintptr_t kAlign = kLanes * sizeof(T);
  return out && n_rows * width * int64_t(sizeof(T)) > kStreamBytes && reinterpret_cast<uintptr_t>(out) % kAlign == 0 &&
         width % kLanes == 0 && half % kLanes == 0;
}

template <class X, bool kInterleaved, bool kStream>
void rope_heads(const RopeHeads& heads, const Rope& a, const TableBlock& table, int64_t b, int64_t begin, int64_t end) {
  for_each_row(heads.y_strides, heads.n_heads, begin, end, [&](int64_t h, int64_t t) FK_INLINE {
    const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
    X* y = static_cast<X*>(heads.y) + heads.y_strides.offset(b, h, t);
    rotate<kInterleaved>(
        table.cos(t - begin), table.sin(t - begin), a.tables.half, a.width,
        [&](int64_t i, auto at) FK_INLINE { return at.load(x + i); },
        [&](int64_t i, auto at, int, Vec v) FK_INLINE { at.template store_to<kStream>(y + i, v); });
  });
}

template <class X, bool kInterleaved, bool kRoundFirst, bool kStream>
void norm_heads(const QkNormRopeHeads& heads, const QkNormRopeForward& a, const TableBlock& table, int64_t b,
                int64_t begin, int64_t end) {
  const int64_t n = a.width;
  for_each_row(heads.y_strides, heads.n_heads, begin, end, [&](int64_t h, int64_t t) FK_INLINE {
    const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
    X* y = static_cast<X*>(heads.y) + heads.y_strides.offset(b, h, t);
    Vec squares[4] = {};
    for_each_vec(n, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec v = at.load(x + i);
      squares[k] += v * v;
    });
    const float rstd = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + a.eps);
    if (heads.rstd) heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t] = rstd;
    const Vec r = splat(rstd);
    rotate<kInterleaved>(
        table.cos(t - begin), table.sin(t - begin), a.tables.half, n,
        [&](int64_t i, auto at) FK_INLINE {
          Vec v = at.load(x + i) * r;
          if constexpr (kRoundFirst) v = rounded<X>(v);
          if (heads.weight) v *= at.load(heads.weight + i);
          return v;
        },
        [&](int64_t i, auto at, int, Vec v) FK_INLINE { at.template store_to<kStream>(y + i, v); });
  });
}

// `dnormed` is scratch space for one head: the gradient of the norm's result, times the weight.
template <class X, bool kInterleaved, bool kRoundFirst, bool kStream>
void norm_gradients(const QkNormRopeGradients& heads, const QkNormRopeBackward& a, const TableBlock& table,
                    float* dnormed, float* dw, int64_t b, int64_t begin, int64_t end) {
  const int64_t n = a.width;
  for_each_row(heads.x_strides, heads.n_heads, begin, end, [&](int64_t h, int64_t t) FK_INLINE {
    const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
    const X* dy = static_cast<const X*>(heads.dy) + heads.dy_strides.offset(b, h, t);
    const Vec r = splat(heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t]);

    // First pass: rotates the gradient back, adds to dW, and forms the one sum over the head that dX needs.
    Vec products[4] = {};
    rotate<kInterleaved>(
        table.cos(t - begin), table.sin(t - begin), a.tables.half, n,
        [&](int64_t i, auto at) FK_INLINE { return at.load(dy + i); },
        [&](int64_t i, auto at, int k, Vec grad) FK_INLINE {
          const Vec normed = at.load(x + i) * r;
          if (dw) at.store(dw + i, at.load(dw + i) + grad * (kRoundFirst ? rounded<X>(normed) : normed));
          if (heads.weight) grad *= at.load(heads.weight + i);
          products[k] += grad * normed;
          at.store(dnormed + i, grad);
        });
    if (!heads.dx) return;

    X* dx = static_cast<X*>(heads.dx) + heads.dx_strides.offset(b, h, t);
    const Vec mean = splat(sum(products) / static_cast<float>(n));
    for_each_vec(n, [&](int64_t i, auto at, int) FK_INLINE {
      at.template store_to<kStream>(dx + i, r * (at.load(dnormed + i) - at.load(x + i) * r * mean));
    });
  });
}

template <class X>
void rope_typed(const Rope& a, int64_t begin, int64_t end) {
  TableBlock table(a.tables, a.interleaved, a.inverse);
  for_each_block(begin, end, a.n_tokens, table.capacity(), [&](int64_t b, int64_t t_begin, int64_t t_end) {
    table.read(b, t_begin, t_end);
    for (const RopeHeads& heads : a.heads) {
      const auto run = [&](auto interleaved, auto streamed) {
        rope_heads<X, interleaved.value, streamed.value>(heads, a, table, b, t_begin, t_end);
      };
      with_bools(run, a.interleaved, worth_streaming<X>(heads.y, heads.n_heads * a.all_tokens, a.width, a.tables.half));
    }
  });
  stream_fence();
}

template <class X>
void forward_typed(const QkNormRopeForward& a, int64_t begin, int64_t end) {
  TableBlock table(a.tables, a.interleaved, false);
  for_each_block(begin, end, a.n_tokens, table.capacity(), [&](int64_t b, int64_t t_begin, int64_t t_end) {
    table.read(b, t_begin, t_end);
    for (const QkNormRopeHeads& heads : a.heads) {
      const auto run = [&](auto interleaved, auto round_first, auto streamed) {
        norm_heads<X, interleaved.value, round_first.value, streamed.value>(heads, a, table, b, t_begin, t_end);
      };
      with_bools(run, a.interleaved, a.round_before_weight,
                 worth_streaming<X>(heads.y, heads.n_heads * a.all_tokens, a.width, a.tables.half));
    }
  });
  stream_fence();
}

template <class X>
void backward_typed(const QkNormRopeBackward& a, int64_t chunk_begin, int64_t chunk_end) {
  TableBlock table(a.tables, a.interleaved, true);
  std::vector<float> dnormed(a.width);
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    for (const QkNormRopeGradients& heads : a.heads)
      if (heads.dw_chunks) std::fill_n(heads.dw_chunks + chunk * a.width, a.width, 0.0f);
    const int64_t begin = chunk * a.chunk_tokens, end = std::min(a.all_tokens, begin + a.chunk_tokens);
    for_each_block(begin, end, a.n_tokens, table.capacity(), [&](int64_t b, int64_t t_begin, int64_t t_end) {
      table.read(b, t_begin, t_end);
      for (const QkNormRopeGradients& heads : a.heads) {
        float* dw = heads.dw_chunks ? heads.dw_chunks + chunk * a.width : nullptr;
        if (!dw && !heads.dx) continue;
        const auto run = [&](auto interleaved, auto round_first, auto streamed) {
          norm_gradients<X, interleaved.value, round_first.value, streamed.value>(heads, a, table, dnormed.data(), dw,
                                                                                  b, t_begin, t_end);
        };
        with_bools(run, a.interleaved, a.round_before_weight,
                   worth_streaming<X>(heads.dx, heads.n_heads * a.all_tokens, a.width, a.tables.half));
      }
    });
  }
  stream_fence();
}

}  // namespace

void rope(const Rope& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) { rope_typed<std::remove_pointer_t<decltype(x)>>(a, begin, end); });
}

void qk_norm_rope_forward(const QkNormRopeForward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) { forward_typed<std::remove_pointer_t<decltype(x)>>(a, begin, end); });
}

void qk_norm_rope_backward(const QkNormRopeBackward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) { backward_typed<std::remove_pointer_t<decltype(x)>>(a, begin, end); });
}

}  // namespace FK_ISA
}  // namespace foundry
