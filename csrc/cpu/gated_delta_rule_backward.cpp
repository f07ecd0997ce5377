// The backward pass of the gated delta rule: the chunks of a head from the last to the first, from the states that the
// forward pass saved.
//
// With the gradients dO of the output, dS of the state after the chunk and dV' of the corrections, and (1 + A)^T dR =
// dV':
//   dV' = (L * Q K^T)^T dO + diag(L_Cj) K dS,   dA = -dR V'^T below the diagonal,   dV = diag(beta) dR
//   dQ = diag(L_i) dO S_0^T + (L * dO V'^T) K
//   dK = (L * dO V'^T)^T Q + diag(L_Cj) V' dS^T - diag(beta L_i) dR S_0^T + (D + D^T) K,   D = diag(beta) L * dA
//   dS_0 = L_C dS + Q^T diag(L_i) dO - K^T diag(beta L_i) dR
// Q and its gradient include the scale. The gradient of a token's g is the sum of those of all decays that span it.
#include "gated_delta_rule_channel_gradients.h"
#include "gated_delta_rule_chunk.h"

namespace foundry {
namespace FK_ISA {
namespace {

struct Backward {
  const DeltaRuleBackward& a;
  const DeltaRuleTask& task;
  DeltaRuleChunk c;
  const DeltaRuleDocument& document;
  int64_t ld, ldk, ldv;

  float *dq, *dk, *of_keys;               // [rows, keys]
  float *dout, *dv, *v_transposed;        // [rows, values]; V' transposed
  float *dweights, *dsystem, *of_decays;  // [rows, rows]
  float *dg, *dstep, *spanning, *into;    // [rows]
  float *state, *dstate, *transposed;     // [keys, values]; [values, keys]
  float* decay;
  // With a decay for each dimension of a key, of which the sums over dimensions above are not used.
  float *dg_rows, *spanning_rows, *into_rows, *of_rows, *of_columns, *keys_reached;  // [rows, keys]
  float *sum_q, *sum_k, *across;

  Backward(const DeltaRuleBackward& args, const DeltaRuleTask& of, float* scratch)
      : a(args),
        task(of),
        c(args, of, scratch),
        document(args.documents[of.document]),
        ld(c.size.rows),
        ldk(c.size.keys),
        ldv(c.size.values) {
    const auto take = [&](int64_t floats) { return (scratch += floats) - floats; };
    dq = take(ld * ldk);
    dk = take(ld * ldk);
    of_keys = take(ld * ldk);
    dout = take(ld * ldv);
    dv = take(ld * ldv);
    v_transposed = take(ld * ldv);
    dweights = take(ld * ld);
    dsystem = take(ld * ld);
    of_decays = take(ld * ld);
    dg = take(ld);
    dstep = take(ld);
    spanning = take(ld);
    into = take(ld);
    state = take(ldk * ldv);
    dstate = take(ldk * ldv);
    transposed = take(ldk * ldv);
    decay = take(ldv);
    if (!c.channels) return;
    for (float** tile : {&dg_rows, &spanning_rows, &into_rows, &of_rows, &of_columns, &keys_reached})
      *tile = take(ld * ldk);
    sum_q = take(kDeltaRuleRows * ldk);
    sum_k = take(kDeltaRuleRows * ldk);
    across = take(ld / kDeltaRuleRows * ldk);
  }

  void run() {
    const int64_t of_head = a.key_width * a.value_width;
    const int64_t at = (task.document * a.n_heads + task.head) * of_head;
    if (a.dfinal_state)
      read_rows(Dtype::f32, a.dfinal_state, at, a.value_width, a.key_width, a.value_width, dstate, ldk, ldv);
    else std::fill(dstate, dstate + ldk * ldv, 0.0f);
    const float* saved = a.states + ((document.batch * a.n_heads + task.head) * a.n_chunks + document.chunk) * of_head;
    const int64_t n_chunks = (document.last - document.first + a.chunk - 1) / a.chunk;
    for (int64_t i = n_chunks; i-- > 0;) {
      read_rows(Dtype::f32, saved, i * of_head, a.value_width, a.key_width, a.value_width, state, ldk, ldv);
      const int64_t first = document.first + i * a.chunk;
      chunk(first, std::min(a.chunk, document.last - first));
    }
    if (a.dinitial_state)
      write_rows(Dtype::f32, dstate, ldv, a.key_width, a.value_width, a.dinitial_state, at, a.value_width);
  }

  void chunk(int64_t first, int64_t count) {
    c.read(document, first, count);
    c.compute_corrections(state);
    read_rows(a.type, a.dout, offset_of(a.dout_strides, document.batch, task.head, first), a.dout_strides.token, c.n,
              a.value_width, dout, c.rows, ldv);
    for (int64_t r = 0; r < c.rows; r += kDeltaRuleRows)
      transpose(c.corrections + r * ldv, ldv, kDeltaRuleRows, ldv, v_transposed + r, ld);
    std::fill(dg, dg + c.rows, 0.0f);
    std::fill(spanning, spanning + c.rows, 0.0f);
    if (c.channels) std::fill(dg_rows, dg_rows + c.rows * ldk, 0.0f);
    of_weights();
    of_corrections();
    of_queries_and_keys();
    if (a.delta) of_system();
    else
      for (int64_t i = 0; i < c.n; ++i) dstep[i] = dot(dv + i * ldv, c.v + i * ldv, ldv);
    if (c.channels) of_pairs();
    if (a.dg || a.ddecay_log || a.ddt_bias) c.channels ? of_g_rows() : of_g();
    write_keys(a.dq, a.dq_strides, first, dq, c.q, c.q_factor, a.scale);
    write_keys(a.dk, a.dk_strides, first, dk, c.k, c.k_factor, 1.0f);
    of_state();
    if (a.dv) {
      for (int64_t i = 0; i < c.n; ++i) scale_row(dv + i * ldv, ldv, c.step[i]);
      write_rows(a.type, dv, ldv, c.n, a.value_width, a.dv, offset_of(a.dv_strides, document.batch, task.head, first),
                 a.dv_strides.token);
    }
    const int64_t numbers = (document.batch * a.n_heads + task.head) * a.n_tokens + first;
    if (c.gate.of_g() && (a.dg || a.ddecay_log || a.ddt_bias)) close_decays(first);
    if (c.gate.of_beta())
      for (int64_t i = 0; i < c.n; ++i)
        dstep[i] = c.gate.close_beta(
            dstep[i], read_number(a.beta, offset_of(a.beta.strides, document.batch, task.head, first + i)));
    if (a.dg && c.channels)
      write_rows(a.g.type, dg_rows, ldk, c.n, a.key_width, a.dg, numbers * a.key_width, a.key_width);
    else if (a.dg) write_rows(a.g.type, dg, 0, 1, c.n, a.dg, numbers, 0);
    if (a.dbeta) write_rows(a.beta.type, dstep, 0, 1, c.n, a.dbeta, numbers, 0);
  }

  // Makes the gradients of the logarithms those of what is before the gate, and adds to those of its parameters.
  void close_decays(int64_t first) {
    const int64_t width = c.channels ? a.key_width : 1;
    const int64_t at = task.document * a.n_heads + task.head;
    double rate = 0.0;
    double* bias = a.ddt_bias ? a.ddt_bias + at * width : nullptr;
    for (int64_t i = 0; i < c.n; ++i) {
      float* x = c.channels ? into_rows : into;  // which are not needed any more
      read_rows(a.g.type, a.g.data, offset_of(a.g.strides, document.batch, task.head, first + i), 0, 1, width, x, 1,
                round_up(width, kAttentionPad));
      c.gate.close_row(c.channels ? dg_rows + i * ldk : dg + i, x, width, rate, bias);
    }
    if (a.ddecay_log) a.ddecay_log[at] += rate;
  }

  // dO V'^T, by which the decays change and then what it is multiplied by.
  void of_weights() {
    multiply_to_lower(c.rows, dout, ldv, a.value_width, v_transposed, ld, dweights, ld);
    for (int64_t i = 0; i < c.rows; ++i) {
      const int64_t edge = round_up(i + 1, kDeltaRuleRows);
      float *row = dweights + i * ld, *both = of_decays + i * ld;
      if (c.channels) {
        std::fill(row + i + 1, row + edge, 0.0f);
        continue;
      }
      for (int64_t j = 0; j < edge; j += kLanes) {
        const Vec d = Whole::load(row + j);
        Whole::store(both + j, d * Whole::load(c.weights + i * ld + j));
        Whole::store(row + j, d * Whole::load(c.decays + i * ld + j));
      }
      std::fill(row + i + 1, row + edge, 0.0f);
      std::fill(both + i, both + edge, 0.0f);  // a token's own output is not decayed
    }
  }

  void of_corrections() {
    multiply_in_parts(c.rows, c.value_vecs, {c.k_end, ldk, 1}, dstate, ldv, a.key_width, dv, ldv, Start::zero);
    for (int64_t i = 0; i < c.rows; ++i) scale_row(dv + i * ldv, ldv, c.to_end[i]);
    multiply_lower_transposed(c.rows, c.value_vecs, c.weights, ld, dout, ldv, dv, ldv, Start::add);
  }

  void of_queries_and_keys() {
    transpose(dstate, ldv, ldk, ldv, transposed, ldk);
    multiply_in_parts(c.rows, c.key_vecs, {c.corrections, ldv, 1}, transposed, ldk, a.value_width, dk, ldk,
                      Start::zero);
    if (c.channels) {
      multiply_rows(dk, dk, c.channels->to_end, c.rows * ldk);
      multiply_rows(into_rows, dk, c.k, c.rows * ldk);
    } else {
      for (int64_t i = 0; i < c.n; ++i) {
        scale_row(dk + i * ldk, ldk, c.to_end[i]);
        into[i] = dot(dk + i * ldk, c.k + i * ldk, ldk);
      }
      multiply_lower_transposed(c.rows, c.key_vecs, dweights, ld, c.q, ldk, dk, ldk, Start::add);
    }
    transpose(state, ldv, ldk, ldv, transposed, ldk);
    multiply_in_parts(c.rows, c.key_vecs, {dout, ldv, 1}, transposed, ldk, a.value_width, dq, ldk, Start::zero);
    if (c.channels) {
      multiply_rows(dq, dq, c.channels->from_start, c.rows * ldk);
      return multiply_rows(spanning_rows, dq, c.q, c.rows * ldk);
    }
    for (int64_t i = 0; i < c.n; ++i) {
      scale_row(dq + i * ldk, ldk, c.from_start[i]);
      spanning[i] = dot(dq + i * ldk, c.q + i * ldk, ldk);
    }
    multiply_lower(c.rows, c.key_vecs, dweights, ld, c.k, ldk, dq, ldk, Start::add);
  }

  void of_system() {
    solve<true>(c.rows, c.value_vecs, c.system, ld, dv, ldv);
    multiply_to_lower(c.rows, dv, ldv, a.value_width, v_transposed, ld, dsystem, ld);
    multiply_in_parts(c.rows, c.key_vecs, {dv, ldv, 1}, transposed, ldk, a.value_width, of_keys, ldk, Start::zero);
    if (c.channels) multiply_rows(of_keys, of_keys, c.channels->from_start, c.rows * ldk);
    for (int64_t i = 0; i < c.rows; ++i) {
      const int64_t edge = round_up(i + 1, kDeltaRuleRows);
      float *row = dsystem + i * ld, *both = of_decays + i * ld;
      std::fill(row + i, row + edge, 0.0f);
      Vec total[4] = {};
      for (int64_t j = 0; j < edge; j += kLanes) {
        const Vec d = -Whole::load(row + j), of_step = d * Whole::load(c.products + i * ld + j);
        total[j / kLanes % 4] += of_step;
        if (c.channels) {
          Whole::store(row + j, d * c.step[i]);
          continue;
        }
        Whole::store(both + j, Whole::load(both + j) + of_step * c.step[i]);
        Whole::store(row + j, d * Whole::load(c.decays + i * ld + j) * c.step[i]);
      }
      const float reads = c.from_start[i] * dot(of_keys + i * ldk, c.k + i * ldk, ldk);
      // What beta multiplies is the correction divided by it: its three parts would cancel.
      const float* correction = c.corrections + i * ldv;
      dstep[i] = std::abs(c.step[i]) > 1e-20f ? dot(dv + i * ldv, correction, ldv) / c.step[i]
                                              : sum(total) + dot(dv + i * ldv, c.v + i * ldv, ldv) - reads;
      spanning[i] -= c.step[i] * reads;
      if (c.channels)
        for (int64_t at = i * ldk; at < (i + 1) * ldk; at += kLanes)
          Whole::store(spanning_rows + at,
                       Whole::load(spanning_rows + at) - Whole::load(of_keys + at) * Whole::load(c.k + at) * c.step[i]);
      add_scaled(dk + i * ldk, of_keys + i * ldk, ldk, -c.step[i] * c.from_start[i]);
    }
    if (c.channels) return;
    multiply_lower(c.rows, c.key_vecs, dsystem, ld, c.k, ldk, dk, ldk, Start::add);
    multiply_lower_transposed(c.rows, c.key_vecs, dsystem, ld, c.k, ldk, dk, ldk, Start::add);
  }

  void of_pairs() {
    DeltaRulePairGradients{*c.channels, c.rows, ld,      c.q,     c.k,        dweights,     a.delta ? dsystem : nullptr,
                           dq,          dk,     dg_rows, of_rows, of_columns, keys_reached, sum_q,
                           sum_k,       across}
        .run();
  }

  // As of_g, for each dimension.
  void of_g_rows() {
    float *before = sum_q, *after = sum_k;
    for (int64_t r = 0; r < ldk; ++r)
      before[r] = r < a.key_width ? dot(dstate + r * ldv, state + r * ldv, ldv) * c.decays_of_chunk()[r] : 0.0f;
    std::fill(after, after + ldk, 0.0f);
    for (int64_t t = 0; t < c.n; ++t)
      for (int64_t at = t * ldk, d = 0; d < ldk; at += kLanes, d += kLanes) {
        const Vec total = Whole::load(before + d);
        Whole::store(dg_rows + at, Whole::load(dg_rows + at) + total);
        Whole::store(before + d, total + Whole::load(into_rows + at));
      }
    for (int64_t t = c.n; t-- > 0;)
      for (int64_t at = t * ldk, d = 0; d < ldk; at += kLanes, d += kLanes) {
        const Vec total = Whole::load(after + d) + Whole::load(spanning_rows + at);
        Whole::store(after + d, total);
        Whole::store(dg_rows + at, Whole::load(dg_rows + at) + total);
      }
  }

  // The decay from token j to token i includes the tokens j + 1 .. i. Only the decays that span a token are added up:
  // a difference of sums over all would cancel.
  void of_g() {
    float whole = 0.0f, before = 0.0f, after = 0.0f;
    for (int64_t r = 0; r < a.key_width; ++r) whole += dot(dstate + r * ldv, state + r * ldv, ldv);
    whole *= c.decay();
    for (int64_t t = 0; t < c.n; ++t) {  // tokens before t, which decay to the chunk's end
      dg[t] = whole + before;
      before += into[t];
    }
    float* columns = into;  // which the loop above was the last to read
    std::fill(columns, columns + c.rows, 0.0f);
    for (int64_t t = c.n; t-- > 0;) {
      after += spanning[t];  // decays from the chunk's start to t and later
      Vec total[4] = {};
      const int64_t edge = round_up(t + 1, kDeltaRuleRows);
      for (int64_t j = 0; j < edge; j += kLanes)
        Whole::store(columns + j, Whole::load(columns + j) + Whole::load(of_decays + t * ld + j));
      for_each_vec(t,
                   [&](int64_t j, auto at, int k) FK_INLINE { total[k] += at.load(columns + j); });
      dg[t] += after + sum(total);
    }
  }

  // Makes the gradient of the state after the chunk that of the state before it. Overwrites q and k.
  void of_state() {
    for (int64_t i = 0; i < c.rows; ++i) {
      scale_row(c.q_start + i * ldk, ldk, c.from_start[i]);
      scale_row(c.k_start + i * ldk, ldk, -c.from_start[i] * c.step[i]);
    }
    const int64_t last = c.rows - 1;  // as multiply_backward
    c.decay_and_add(dstate, {c.q_start + last * ldk, 1, -ldk}, dout + last * ldv, -ldv, decay);
    if (a.delta) multiply_backward(a.key_width, c.value_vecs, c.k_start, ldk, dv, ldv, c.rows, dstate, ldv, Start::add);
  }

  // The gradient of x from that of scale * x, or of its normalised form.
  void write_keys(void* out, const HeadStrides& strides, int64_t first, float* dx, const float* x, const float* factor,
                  float scale) {
    if (!out) return;
    for (int64_t i = 0; i < c.n; ++i) {
      float* row = dx + i * ldk;
      if (!a.l2norm) {
        if (scale != 1.0f) scale_row(row, ldk, scale);
        continue;
      }
      const float along = dot(row, x + i * ldk, ldk) / scale;
      scale_row(row, ldk, scale);
      add_scaled(row, x + i * ldk, ldk, -along);
      scale_row(row, ldk, factor[i]);
    }
    const bool shared = a.group > 1;
    const int64_t head = task.head;
    write_rows(shared ? Dtype::f32 : a.type, dx, ldk, c.n, a.key_width, out,
               offset_of(strides, document.batch, head, first), strides.token);
  }
};

}  // namespace

void gated_delta_rule_backward(const DeltaRuleBackward& a, const DeltaRuleTask& task, float* scratch) {
  Backward(a, task, scratch).run();
}

void gated_delta_rule_sum_groups(const DeltaRuleGroups& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* t) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row / a.n_tokens, token = row % a.n_tokens;
      const float* in = a.parts + (head * a.group * a.n_tokens + token) * a.width;
      auto* out = static_cast<decltype(t)>(a.out) + offset_of(a.out_strides, head / a.n_heads, head % a.n_heads, token);
      for_each_vec(a.width, [&](int64_t i, auto at, int) FK_INLINE {
        Vec total = at.load(in + i);
        for (int64_t g = 1; g < a.group; ++g) total += at.load(in + g * a.n_tokens * a.width + i);
        at.store(out + i, total);
      });
    }
  });
}

}  // namespace FK_ISA
}  // namespace foundry
