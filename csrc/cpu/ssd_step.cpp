// One token of state-space duality: each head's state is read and written once. Compiled once per instruction set (see
// isa.h).
#include "ssd.h"

#include <cmath>

#include "gated_delta_rule_rows.h"
#include "math.h"

namespace foundry {
namespace FK_ISA {
namespace {

float step_size(const SsdStep& a, int64_t b, int64_t h) {
  float dt = read_number(a.dt, offset_of(a.dt.strides, b, h, 0));
  if (a.dt_bias.data) dt += read_number(a.dt_bias, offset_of(a.dt_bias.strides, b, h, 0));
  if (a.softplus && dt <= 20.0f) dt = std::log1p(std::exp(dt));
  return dt < a.dt_min ? a.dt_min : dt > a.dt_max ? a.dt_max : dt;
}

// S = decay S + x B^T, y = S C for rows of the state that belong to entries of x.
void rows_of_x(float* state, int64_t width, int64_t state_width, const float* x, const float* B, const float* C,
               float decay, float* y) {
  for (int64_t p = 0; p < width; ++p, state += state_width) {
    Vec sums[4] = {};
    const Vec by = splat(x[p]);
    for_each_vec(state_width, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec now = at.load(state + i) * decay + at.load(B + i) * by;
      at.store(state + i, now);
      sums[k] += now * at.load(C + i);
    });
    y[p] = sum(sums);
  }
}

// The same for a state whose rows belong to entries of B and C.
void rows_of_B(float* state, int64_t width, int64_t state_width, const float* x, const float* B, const float* C,
               float decay, float* y) {
  std::fill(y, y + width, 0.0f);
  for (int64_t n = 0; n < state_width; ++n, state += width) {
    const Vec in = splat(B[n]), out = splat(C[n]);
    for_each_vec(width, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec now = at.load(state + i) * decay + at.load(x + i) * in;
      at.store(state + i, now);
      at.store(y + i, at.load(y + i) + now * out);
    });
  }
}

}  // namespace

void ssd_step(const SsdStep& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t width = round_up(a.width, kAttentionPad), state_width = round_up(a.state_width, kAttentionPad);
  float *x = scratch, *scaled = x + width, *y = scaled + width, *more = y + width, *B = more + width,
        *C = B + state_width;
  int64_t read = -1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / a.n_heads, h = i % a.n_heads, shared = i / a.group;
    if (shared != read) {
      read = shared;
      read_rows(a.type, a.B, offset_of(a.B_strides, b, h / a.group, 0), 0, 1, a.state_width, B, 1, state_width);
      read_rows(a.type, a.C, offset_of(a.C_strides, b, h / a.group, 0), 0, 1, a.state_width, C, 1, state_width);
    }
    read_rows(a.type, a.x, offset_of(a.x_strides, b, h, 0), 0, 1, a.width, x, 1, width);
    const float dt = step_size(a, b, h), decay = std::exp(dt * read_number(a.A, offset_of(a.A.strides, b, h, 0)));
    scaled_copy(scaled, x, a.width, dt);
    float* state = a.state + b * a.state_batch + h * a.state_head;
    (a.transposed ? rows_of_B : rows_of_x)(state, a.width, a.state_width, scaled, B, C, decay, y);
    if (a.D.data && a.D_is_row) {
      read_rows(a.D.type, a.D.data, offset_of(a.D.strides, b, h, 0), 0, 1, a.width, more, 1, width);
      for_each_vec(a.width, [&](int64_t c, auto at, int) FK_INLINE {
        at.store(y + c, at.load(y + c) + at.load(more + c) * at.load(x + c));
      });
    } else if (a.D.data) {
      add_scaled(y, x, a.width, read_number(a.D, offset_of(a.D.strides, b, h, 0)));
    }
    if (a.z) {
      read_rows(a.type, a.z, offset_of(a.z_strides, b, h, 0), 0, 1, a.width, more, 1, width);
      for_each_vec(a.width, [&](int64_t c, auto at, int) FK_INLINE {
        const Vec gate = at.load(more + c);
        at.store(y + c, at.load(y + c) * gate / (1.0f + exp(-gate)));
      });
    }
    write_rows(a.type, y, 0, 1, a.width, a.y, i * a.width, 0);
  }
}

}  // namespace FK_ISA
}  // namespace foundry
