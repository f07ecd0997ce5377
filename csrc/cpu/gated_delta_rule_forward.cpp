// The forward pass of the gated delta rule: the chunks of a head one after another.
#include "gated_delta_rule_chunk.h"

namespace foundry {
namespace FK_ISA {

void gated_delta_rule_forward(const DeltaRuleForward& a, const DeltaRuleTask& task, float* scratch) {
  DeltaRuleChunk c(a, task, scratch);
  const int64_t ldk = c.size.keys, ldv = c.size.values;
  float* out = scratch;
  float* state = out + c.size.rows * ldv;
  float* decay = state + ldk * ldv;
  const DeltaRuleDocument& document = a.documents[task.document];
  const int64_t of_head = a.key_width * a.value_width;
  const int64_t at = (task.document * a.n_heads + task.head) * of_head + task.first_column;
  if (a.initial_state)
    read_rows(Dtype::f32, a.initial_state, at, a.value_width, a.key_width, task.n_columns, state, ldk, ldv);
  else std::fill(state, state + ldk * ldv, 0.0f);
  bool is_zero = !a.initial_state;
  float* saved = nullptr;
  if (a.states)
    saved = a.states + ((document.batch * a.n_heads + task.head) * a.n_chunks + document.chunk) * of_head +
            task.first_column;
  for (int64_t first = document.first; first < document.last; first += a.chunk) {
    if (saved) {
      write_rows(Dtype::f32, state, ldv, a.key_width, task.n_columns, saved, 0, a.value_width);
      saved += of_head;
    }
    c.read(document, first, std::min(a.chunk, document.last - first));
    c.compute_corrections(is_zero ? nullptr : state);
    if (!is_zero) {
      multiply_in_parts(c.rows, c.value_vecs, {c.q_start, ldk, 1}, state, ldv, a.key_width, out, ldv, Start::zero);
      for (int64_t i = 0; i < c.n; ++i) scale_row(out + i * ldv, ldv, c.from_start[i]);
    }
    multiply_lower(c.rows, c.value_vecs, c.weights, c.size.rows, c.corrections, ldv, out, ldv,
                   is_zero ? Start::zero : Start::add);
    write_rows(a.type, out, ldv, c.n, task.n_columns, a.out,
               offset_of(a.out_strides, document.batch, task.head, first) + task.first_column, a.out_strides.token);
    if (first + a.chunk >= document.last && !a.final_state) return;
    for (int64_t i = 0; i < c.n; ++i) scale_row(c.k_end + i * ldk, ldk, c.to_end[i]);
    c.decay_and_add(state, {c.k_end, 1, ldk}, c.corrections, ldv, decay);
    is_zero = false;
  }
  if (a.final_state) write_rows(Dtype::f32, state, ldv, a.key_width, task.n_columns, a.final_state, at, a.value_width);
}

}  // namespace FK_ISA
}  // namespace foundry
