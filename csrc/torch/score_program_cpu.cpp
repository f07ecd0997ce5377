#include "score_program.h"

#include <algorithm>
#include <limits>

namespace foundry {
namespace score_program {

constexpr int64_t kOps = int64_t(ScoreOp::where) + 1;

// A value of the program.
struct Value {
  ScoreOp op;
  ScoreKind kind;
  std::vector<int> operands;  // values; of a load its indices
  uint32_t bits = 0;
  int slot = 0;
  int64_t negative = 0;
  bool of_rows = false, of_keys = false;  // what it varies with
  bool live = false, kept = false;        // kept: needed for the whole tile
  int last_use = -1;                      // the last live value that reads it
  int at = -1, spread = -1;               // registers
  // Of integers: whether it is by_q * q + by_k * k + a number that varies with neither.
  bool affine = false;
  int64_t by_q = 0, by_k = 0;
};

struct Program {
  std::vector<int64_t> ranks;  // of the slots
  std::vector<Value> values;
  std::vector<int> outputs, loads;  // loads: of floating-point tensors
};

// Reads one program of the list from `at` on.
class Reader {
 public:
  Reader(const std::vector<int64_t>& code, size_t at, size_t n_tensors) : code_(code), at_(at), n_tensors_(n_tensors) {}

  Program read() {
    Program p;
    const int64_t n_slots = next(0, int64_t(n_tensors_)), n_values = next(0, kMost), n_outputs = next(1, kMost);
    for (int64_t i = 0; i < n_slots; ++i) next(0, 2), p.ranks.push_back(next(0, kMost));
    std::vector<int> known;  // the values of instructions: those of `detach` are their operands'
    for (int64_t i = 0; i < n_values; ++i) {
      const auto op = ScoreOp(next(0, kOps - 1));
      const auto kind = ScoreKind(next(0, 2));
      next(0, kMost);
      const int64_t n = next(0, kMost);
      const auto value = [&] { return known[next(0, int64_t(known.size()) - 1)]; };
      if (op == ScoreOp::detach) {
        need(n == 1);
        known.push_back(value());
        continue;
      }
      Value x{op, kind, {}};
      if (op == ScoreOp::constant) {
        need(n == 1);
        x.bits = bits_of(kind, next());
      } else if (op == ScoreOp::load) {
        x.slot = int(next(0, n_slots - 1));
        need(n == 2 + p.ranks[x.slot]);
        x.negative = next();
        for (int64_t d = 2; d < n; ++d) x.operands.push_back(value());
      } else {
        need(n == (op <= ScoreOp::k                              ? 0
                   : op < ScoreOp::add || op == ScoreOp::bit_not ? 1
                   : op == ScoreOp::where                        ? 3
                                                                 : 2));
        for (int64_t d = 0; d < n; ++d) x.operands.push_back(value());
      }
      if (op == ScoreOp::load && kind == ScoreKind::real) p.loads.push_back(int(p.values.size()));
      known.push_back(int(p.values.size()));
      p.values.push_back(std::move(x));
    }
    for (int64_t i = 0; i < n_outputs; ++i) p.outputs.push_back(known[next(0, n_values - 1)]);
    return p;
  }

  size_t end() const { return at_; }

 private:
  static constexpr int64_t kMost = 1 << 20;

  static void need(bool good) { TORCH_CHECK_VALUE(good, "score_mod is not the code of a program"); }
  int64_t next() {
    need(at_ < code_.size());
    return code_[at_++];
  }
  int64_t next(int64_t least, int64_t most) {
    const int64_t x = next();
    need(least <= x && x <= most);
    return x;
  }
  static uint32_t bits_of(ScoreKind kind, int64_t x) {
    if (kind == ScoreKind::boolean) return x ? ~uint32_t(0) : 0;
    if (kind == ScoreKind::integer) return static_cast<uint32_t>(x);
    double wide;
    std::memcpy(&wide, &x, sizeof(x));
    const auto number = static_cast<float>(wide);
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits;
  }

  const std::vector<int64_t>& code_;
  size_t at_, n_tensors_;
};

class Planner {
 public:
  Planner(Program program, const std::vector<ScoreTensor>& tensors, const ScoreQuery& query)
      : p_(std::move(program)),
        tensors_(tensors),
        query_(query) {
    plan_.keys_in_lanes = query.keys_in_lanes;
    plan_.slope = -1;
  }

  ScorePlan plan() {
    find_shapes();
    const int result = p_.outputs[0];
    std::vector<int> wanted{result};
    int slope = -1;
    if (query_.slope && !is_one(p_.outputs.at(1))) wanted.push_back(slope = p_.outputs[1]);
    std::vector<std::pair<int, int>> gradients;  // a load and its derivative
    for (size_t i = 0; i < p_.loads.size(); ++i) {
      const auto& slots = query_.gradients;
      if (std::find(slots.begin(), slots.end(), p_.values[p_.loads[i]].slot) == slots.end()) continue;
      gradients.emplace_back(p_.loads[i], p_.outputs.at(2 + i));
      wanted.push_back(gradients.back().second);
      for (int index : p_.values[p_.loads[i]].operands) wanted.push_back(index);
    }
    for (size_t i = 1; i < wanted.size(); ++i) p_.values[wanted[i]].kept = true;
    find_live(wanted);
    for (int i = 0; i < int(p_.values.size()); ++i)
      if (p_.values[i].live) emit(i, result);
    if (p_.values[result].op != ScoreOp::score && p_.values[result].at != scores())
      plan_.of_chunk.push_back({ScoreOp::copy, ScoreKind::real, scores(), {operand(result)}, 0, 0});
    if (slope >= 0) {
      plan_.slope = whole(slope);
      if (plan_.registers[plan_.slope].layout != ScoreLayout::tile) {
        const int tile = add(ScoreLayout::tile, ScoreMemory::tile, kScoreLanes * kScoreLanes);
        plan_.of_chunk.push_back({ScoreOp::copy, ScoreKind::real, tile, {plan_.slope}, 0, 0});
        plan_.slope = tile;
      }
    }
    for (const auto& [load, derivative] : gradients) {
      const Value& x = p_.values[load];
      const auto slot = std::find(query_.gradients.begin(), query_.gradients.end(), x.slot) - query_.gradients.begin();
      const auto sizes = tensors_[x.slot].data.sizes();
      std::vector<int64_t> strides(sizes.size());
      for (int64_t d = int64_t(sizes.size()) - 1, next = 1; d >= 0; next *= sizes[d--]) strides[d] = next;
      ScoreGradient made{
          whole(derivative), load_of(x, strides, [&](int at) { return whole(at); }), int(slot), {-1, -1, -1}};
      for (int d = 0; d < int(x.operands.size()); ++d) {
        const ScoreOp op = p_.values[x.operands[d]].op;
        if (ScoreOp::b <= op && op <= ScoreOp::q) made.indexed_by[int(op) - int(ScoreOp::b)] = d;
      }
      plan_.gradients.push_back(std::move(made));
    }
    return std::move(plan_);
  }

 private:
  bool is_one(int at) const { return p_.values[at].op == ScoreOp::constant && p_.values[at].bits == 0x3F800000u; }

  void find_shapes() {
    for (Value& x : p_.values) {
      const bool score = x.op == ScoreOp::score;
      x.of_rows = score || x.op == ScoreOp::q || (x.op == ScoreOp::h && query_.own_heads);
      x.of_keys = score || x.op == ScoreOp::k;
      for (int i : x.operands) {
        x.of_rows |= p_.values[i].of_rows;
        x.of_keys |= p_.values[i].of_keys;
      }
      find_slope(x);
    }
  }

  void find_slope(Value& x) const {
    const Value &a = x.operands.empty() ? x : p_.values[x.operands[0]],
                &b = x.operands.empty() ? x : p_.values[x.operands.back()];
    const auto set = [&](int64_t by_q, int64_t by_k) {
      constexpr int64_t kMost = 1 << 20;
      x.affine = std::abs(by_q) < kMost && std::abs(by_k) < kMost;
      x.by_q = by_q, x.by_k = by_k;
    };
    const auto times = [&](const Value& y, const Value& constant) {
      const auto factor = static_cast<int32_t>(constant.bits);
      set(y.by_q * factor, y.by_k * factor);
    };
    if (x.kind != ScoreKind::integer || query_.own_heads) return;
    if (!x.of_rows && !x.of_keys) return set(0, 0);
    if (x.op == ScoreOp::q) return set(1, 0);
    if (x.op == ScoreOp::k) return set(0, 1);
    if (x.operands.empty() || !a.affine || !b.affine) return;
    if (x.op == ScoreOp::add) set(a.by_q + b.by_q, a.by_k + b.by_k);
    if (x.op == ScoreOp::sub) set(a.by_q - b.by_q, a.by_k - b.by_k);
    if (x.op == ScoreOp::neg) set(-a.by_q, -a.by_k);
    if (x.op == ScoreOp::mul && a.op == ScoreOp::constant) times(b, a);
    else if (x.op == ScoreOp::mul && b.op == ScoreOp::constant) times(a, b);
  }

  void find_live(const std::vector<int>& wanted) {
    for (int i : wanted) p_.values[i].live = true;
    for (int i = int(p_.values.size()) - 1; i >= 0; --i)
      if (p_.values[i].live)
        for (int operand : p_.values[i].operands) {
          Value& x = p_.values[operand];
          x.live = true;
          x.last_use = std::max(x.last_use, i);
        }
  }

  // A tile's values lie in lanes or steps.
  bool in_lanes(const Value& x) const { return query_.keys_in_lanes ? x.of_keys : x.of_rows; }
  static bool is_tile(const Value& x) { return x.of_rows && x.of_keys; }

  int add(ScoreLayout layout, ScoreMemory memory, int64_t floats) {
    int64_t& end = memory == ScoreMemory::block ? plan_.block_floats : plan_.tile_floats;
    plan_.registers.push_back({layout, memory, memory == ScoreMemory::scores ? 0 : end});
    if (memory != ScoreMemory::scores) end += floats;
    return int(plan_.registers.size()) - 1;
  }

  int scores() {
    if (scores_ < 0) scores_ = add(ScoreLayout::scores, ScoreMemory::scores, 0);
    return scores_;
  }

  // A register for a value that is one number, or one per row or key; and the instructions that compute it.
  ScoreMemory memory_of(const Value& x) const { return x.of_keys ? ScoreMemory::tile : ScoreMemory::block; }
  std::vector<ScoreInstruction>& list_of(const Value& x) {
    return is_tile(x) ? plan_.of_chunk : x.of_keys ? plan_.of_tile : plan_.of_block;
  }
  int add_vector(const Value& x) {
    if (!x.of_rows && !x.of_keys) return add(ScoreLayout::one, ScoreMemory::block, kScoreVector);
    return add(in_lanes(x) ? ScoreLayout::lanes : ScoreLayout::steps, memory_of(x), kScoreLanes);
  }

  // The register from which instructions on tiles read a value.
  int operand(int at) {
    Value& x = p_.values[at];
    if (is_tile(x) || in_lanes(x) || (!x.of_rows && !x.of_keys)) return x.at;
    if (x.spread < 0) {
      x.spread = add(ScoreLayout::spread, memory_of(x), kScoreLanes * kScoreVector);
      list_of(x).push_back({ScoreOp::spread, x.kind, x.spread, {x.at}, 0, 0});
    }
    return x.spread;
  }
  // The same for what is kept for the whole tile.
  int whole(int at) {
    Value& x = p_.values[at];
    return x.op == ScoreOp::score ? kept_scores_ : operand(at);
  }

  int add_chunk() {
    if (free_.empty()) return add(ScoreLayout::chunk, ScoreMemory::tile, kScoreSteps * kScoreLanes);
    const int at = free_.back();
    free_.pop_back();
    return at;
  }

  void emit(int i, int result) {
    Value& x = p_.values[i];
    if (x.op == ScoreOp::score) {
      x.at = scores();
      if (x.kept) {
        kept_scores_ = add(ScoreLayout::tile, ScoreMemory::tile, kScoreLanes * kScoreLanes);
        plan_.of_chunk.push_back({ScoreOp::copy, ScoreKind::real, kept_scores_, {scores()}, 0, 0});
      }
      return;
    }
    ScoreInstruction made{x.op, x.operands.empty() ? x.kind : p_.values[x.operands.back()].kind, -1, {0, 0, 0}, x.bits,
                          0};
    if (x.op == ScoreOp::load) {
      const auto strides = tensors_[x.slot].data.strides();
      const bool spreads = is_tile(x) && along_of(x) < 0;
      const auto read = [&](int at) { return spreads ? operand(at) : p_.values[at].at; };
      made.load = int(plan_.loads.size());
      plan_.loads.push_back(load_of(x, {strides.begin(), strides.end()}, read));
      const ScoreLoad& l = plan_.loads.back();
      if (l.along >= 0) {
        made.from[0] = add(ScoreLayout::offsets, ScoreMemory::block, 2 * kScoreLanes);
        ScoreInstruction offsets{ScoreOp::offsets, ScoreKind::integer, made.from[0], {0, 0, 0}, 0, made.load};
        plan_.of_block.push_back(offsets);
      }
    } else {
      for (size_t n = 0; n < x.operands.size(); ++n)
        made.from[n] = is_tile(x) ? operand(x.operands[n]) : p_.values[x.operands[n]].at;
    }
    if (is_tile(x)) {
      for (size_t n = 0; n < x.operands.size(); ++n) release(x, n, i);
      made.to = x.at = x.kept ? add(ScoreLayout::tile, ScoreMemory::tile, kScoreLanes * kScoreLanes)
                       : i == result && !reads_score_after(i) ? scores()
                                                              : add_chunk();
    } else {
      made.to = x.at = add_vector(x);
    }
    list_of(x).push_back(made);
  }

  // Frees the register of operand n of value i, if this is its last use.
  void release(const Value& x, size_t n, int i) {
    const Value& operand = p_.values[x.operands[n]];
    const auto& all = x.operands;
    if (!is_tile(operand) || operand.kept || operand.last_use != i || x.operands[n] == p_.outputs[0]) return;
    if (std::find(all.begin(), all.begin() + n, all[n]) != all.begin() + n) return;  // has been freed
    if (plan_.registers[operand.at].layout == ScoreLayout::chunk) free_.push_back(operand.at);
  }

  bool reads_score_after(int i) const {
    for (const Value& x : p_.values)
      if (x.op == ScoreOp::score && x.last_use > i) return true;
    return false;
  }

  // See ScoreLoad.
  int along_of(const Value& x) const {
    int along = -1, of_keys = 0;
    for (int d = 0; d < int(x.operands.size()); ++d) {
      of_keys += p_.values[x.operands[d]].of_keys;
      if (p_.values[x.operands[d]].op == ScoreOp::k) along = d;
    }
    return is_tile(x) && of_keys == 1 && tensors_[x.slot].data.numel() > 0 ? along : -1;
  }

  template <class Read>
  ScoreLoad load_of(const Value& x, const std::vector<int64_t>& strides, Read&& read) const {
    const ScoreTensor& t = tensors_[x.slot];
    ScoreLoad l{t.data.const_data_ptr(), t.type, {}, t.data.numel() == 0, true, -1, 0};
    int64_t extent = 0, by_lane = 0, by_step = 0;
    bool affine = is_tile(x) && !l.is_empty;
    for (int d = 0; d < int(x.operands.size()); ++d) {
      const int64_t size = t.data.size(d);
      const Value& index = p_.values[x.operands[d]];
      ScoreDimension made{size,       strides[d],          index.by_q,
                          index.by_k, read(x.operands[d]), (x.negative >> std::min(d, 62) & 1) != 0};
      if (query_.keys_in_lanes) std::swap(made.by_lane, made.by_step);
      by_lane += made.by_lane * made.stride;
      by_step += made.by_step * made.stride;
      affine = affine && index.affine;
      l.dimensions.push_back(made);
      extent += std::abs(strides[d]) * std::max<int64_t>(0, size - 1);
      l.narrow = l.narrow && size <= std::numeric_limits<int32_t>::max();
    }
    l.narrow = l.narrow && extent <= std::numeric_limits<int32_t>::max();
    l.along = along_of(x);
    if (affine && l.along < 0 && by_lane == -by_step) l.diagonal = by_lane;
    return l;
  }

  Program p_;
  const std::vector<ScoreTensor>& tensors_;
  const ScoreQuery& query_;
  ScorePlan plan_{};
  int scores_ = -1, kept_scores_ = -1;
  std::vector<int> free_;  // registers of chunks
};

}  // namespace score_program

std::vector<ScoreTensor> score_tensors_of(const std::vector<at::Tensor>& tensors) {
  std::vector<ScoreTensor> found;
  for (const at::Tensor& t : tensors) switch (t.scalar_type()) {
      case at::kFloat: found.push_back({ScoreType::f32, t}); break;
      case at::kBFloat16: found.push_back({ScoreType::bf16, t}); break;
      case at::kHalf: found.push_back({ScoreType::f16, t}); break;
      case at::kDouble: found.push_back({ScoreType::f64, t}); break;
      case at::kInt: found.push_back({ScoreType::i32, t}); break;
      case at::kLong: found.push_back({ScoreType::i64, t}); break;
      case at::kBool: found.push_back({ScoreType::boolean, t}); break;
      default:
        if (t.is_floating_point()) found.push_back({ScoreType::f32, t.to(at::kFloat)});
        else found.push_back({ScoreType::i64, t.to(at::kLong)});
    }
  return found;
}

ScorePlan plan_scores(const std::vector<int64_t>& code, const std::vector<ScoreTensor>& tensors,
                      const ScoreQuery& query) {
  using namespace score_program;
  Reader reader(code, 0, tensors.size());
  Program program = reader.read();
  if (query.slope || !query.gradients.empty()) program = Reader(code, reader.end(), tensors.size()).read();
  TORCH_CHECK_VALUE(program.ranks.size() == tensors.size(), "score_tensors must be ", program.ranks.size(), " tensors");
  for (size_t i = 0; i < tensors.size(); ++i)
    TORCH_CHECK_VALUE(tensors[i].data.dim() == program.ranks[i], "score_tensors[", i, "] must have ", program.ranks[i],
                      " dimensions; got ", tensors[i].data.sizes());
  TORCH_CHECK_VALUE((!query.slope && query.gradients.empty()) || program.outputs.size() == 2 + program.loads.size(),
                    "score_mod must hold a program and its derivatives");
  return Planner(std::move(program), tensors, query).plan();
}

}  // namespace foundry
