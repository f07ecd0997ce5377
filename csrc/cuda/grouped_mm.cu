// Grouped matmuls. y and dx share one kernel, which takes the strides of the matrices; the gradient of the matrices is
// another kernel. A block computes a tile of one group's result and walks the whole inner dimension in order: no
// atomics, no partial sums in memory.
//
// Aligned 16-bit operands use tensor cores: kStages tiles of each operand are on their way to shared memory while one
// is multiplied. ldmatrix reads operands whose inner dimension is contiguous or strided. Everything else (float32,
// unaligned rows) uses fused multiply-adds and supports any strides.
#include "grouped_mm.h"

#include "dispatch.cuh"
#include "tiles.cuh"

namespace foundry {
namespace cuda {
namespace {

using namespace tiles;

// --- what a block computes -------------------------------------------------------------------------------------------

// One operand of a matmul, from a tile's first row or column on: `n` rows or columns along the inner dimension.
template <class T>
struct Operand {
  const T* data;
  int64_t own_stride, sum_stride;
  int n;
};

// out [left.n, right.n] = left times right, summed over `n_sum` numbers.
template <class T>
struct Job {
  Operand<T> left, right;
  int n_sum;
  T* out;
  int out_stride;
};

// The tiles of the results: those of one group or, if the groups' rows follow one another, an upper bound for all
// groups.
struct Grid {
  int down, across;
};

// Row and column of tile `i`. Blocks that run at the same time handle kTogether rows of tiles, column by column, so
// that several of them find both operands in the L2 cache.
constexpr int kTogether = 8;

struct Place {
  int down, across;

  __device__ Place(unsigned i, const Grid& grid) {
    const unsigned band = kTogether * grid.across, first = i / band * kTogether;
    const unsigned rows = min(grid.down - first, static_cast<unsigned>(kTogether));
    down = first + i % band % rows;
    across = i % band / rows;
  }
};

struct Group {
  int index, start, end;
  int tile;  // within its rows
};

// The rows of a group; group n_groups means the rows in no group. Clamped to 0 .. n_rows for any offs.
__device__ __forceinline__ Group rows_of(const int32_t* offs, int group, int n_rows, int n_groups) {
  const int start = group == 0 ? 0 : min(max(offs[group - 1], 0), n_rows);
  const int end = group == n_groups ? n_rows : max(start, min(offs[group], n_rows));
  return Group{group, start, end, 0};
}

// The group of tile `tile`, counting the tiles of all groups one after another; index -1 if there are fewer. Every warp
// searches by itself, 32 groups at a time. A tile has at least 16 rows, so there are fewer than 2^32 tiles.
template <int kRows>
__device__ __forceinline__ Group find_group(const int32_t* offs, unsigned tile, int n_rows, int n_groups) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first <= n_groups; first += 32) {
    Group own{first + lane, 0, 0, 0};
    if (own.index <= n_groups) own = rows_of(offs, own.index, n_rows, n_groups);
    const unsigned tiles = (static_cast<unsigned>(own.end - own.start) + kRows - 1) / kRows;
    unsigned sum = tiles;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const unsigned other = __shfl_up_sync(kAll, sum, d);
      if (lane >= d) sum += other;
    }
    const unsigned before = sum - tiles;
    const bool here = tile >= before && tile < sum;
    if (__any_sync(kAll, here)) {
      const auto of_that_lane = [&](unsigned v) { return static_cast<int>(__reduce_add_sync(kAll, here ? v : 0u)); };
      return Group{of_that_lane(own.index), of_that_lane(own.start), of_that_lane(own.end),
                   of_that_lane(tile - before)};
    }
    tile -= __shfl_sync(kAll, sum, 31);
  }
  return Group{-1, 0, 0, 0};
}

// Returns false if there is nothing to do. The result is the same for the whole block.
template <int kM, int kN, class T>
__device__ __forceinline__ bool find_job(const GroupedMm& a, const Grid& grid, Job<T>& job) {
  const Place place(blockIdx.x, grid);
  const Group group = find_group<kM>(a.offs, place.down, a.n_rows, a.n_groups);
  if (group.index < 0) return false;
  const int row = group.start + group.tile * kM, col = place.across * kN;
  const int64_t* w = a.weight_strides;
  const bool some = group.index < a.n_groups;
  job.left = {static_cast<const T*>(a.x) + row * a.x_strides[0], a.x_strides[0], a.x_strides[1], group.end - row};
  job.right = {static_cast<const T*>(a.weight) + (some ? group.index * w[0] + col * w[2] : 0), w[2], w[1],
               a.n_out - col};
  job.n_sum = some ? a.n_in : 0;
  job.out = static_cast<T*>(a.y) + static_cast<int64_t>(row) * a.n_out + col;
  job.out_stride = a.n_out;
  return true;
}

template <int kM, int kN, class T>
__device__ __forceinline__ bool find_job(const GroupedMmGradient& a, const Grid& grid, Job<T>& job) {
  const unsigned tiles = static_cast<unsigned>(grid.down) * grid.across;
  const Place place(blockIdx.x % tiles, grid);
  const Group group = rows_of(a.offs, blockIdx.x / tiles, a.n_rows, a.n_groups);
  const int row = place.down * kM, col = place.across * kN;
  job.left = {static_cast<const T*>(a.a) + group.start * a.a_strides[0] + row * a.a_strides[1], a.a_strides[1],
              a.a_strides[0], a.n_a - row};
  job.right = {static_cast<const T*>(a.b) + group.start * a.b_strides[0] + col * a.b_strides[1], a.b_strides[1],
               a.b_strides[0], a.n_b - col};
  job.n_sum = group.end - group.start;
  job.out = static_cast<T*>(a.out) + (static_cast<int64_t>(group.index) * a.n_a + row) * a.n_b + col;
  job.out_stride = a.n_b;
  return true;
}

// --- matrix instructions ---------------------------------------------------------------------------------------------

constexpr int kColumns = 128;  // columns of a block's result; a warp has 32 of them
constexpr int kDepth = 64;     // length of a tile along the inner dimension

template <int kRows_, int kWarpsDown_, int kStages_>
struct Shape {
  static constexpr int kRows = kRows_, kStages = kStages_;
  static constexpr int kThreads = kWarpsDown_ * 128, kBlocks = kRows / kWarpsDown_ / 16;         // of 16 rows
  static constexpr uint32_t kLeft = kRows * kDepth * 2, kStage = kLeft + kColumns * kDepth * 2;  // bytes
  static constexpr size_t kShared = kStages * kStage;
};

// One operand's tiles in shared memory: kOwn rows along the inner dimension or, if the inner dimension is strided
// (kAcross), rows of kOwn numbers.
template <int kOwn, bool kAcross, int kThreads>
struct Side {
  static constexpr int kRow = kAcross ? kOwn : kDepth;

  template <class T, class Shared>
  static __device__ __forceinline__ void copy(Shared& shared, uint32_t at, const Operand<T>& from, int first,
                                              int n_sum) {
    if constexpr (kAcross)
      Copier<kRow, kThreads>(from.data, from.sum_stride, from.n).template copy<kDepth, true>(shared, at, first, n_sum);
    else
      Copier<kRow, kThreads>(from.data + first, from.own_stride, n_sum - first)
          .template copy<kOwn, true>(shared, at, 0, from.n);
  }
  // A lane's ldmatrix address for block number `block` of 16 rows or columns, and step number `step` of 16 along the
  // inner dimension.
  static __device__ __forceinline__ uint32_t fragment(uint32_t lane_at, int block, int step) {
    return kAcross ? (lane_at ^ (block * 32)) + step * 32 * kRow : (lane_at ^ (step * 32)) + block * 32 * kRow;
  }
  template <class Shared>
  static __device__ __forceinline__ void load(uint32_t (&r)[4], Shared& shared, uint32_t byte) {
    if constexpr (kAcross) ldmatrix_trans(r, shared, byte);
    else ldmatrix(r, shared, byte);
  }
};

template <class T, class S, bool kLeftAcross, bool kRightAcross, class Args>
__global__ void __launch_bounds__(S::kThreads, 2) tiles_kernel(const Args a, const Grid grid) {
  using Left = Side<S::kRows, kLeftAcross, S::kThreads>;
  using Right = Side<kColumns, kRightAcross, S::kThreads>;
  FK_DYNAMIC_SHARED(uint4, shared);
  Job<T> job;
  if (!find_job<S::kRows, kColumns>(a, grid, job)) return;
  const int lane = threadIdx.x % 32, across = threadIdx.x / 32 % 4, down = threadIdx.x / 128;
  const int n_steps = (job.n_sum + kDepth - 1) / kDepth;
  const auto copy = [&](int step) {
    if (step < n_steps) {
      const uint32_t at = step % S::kStages * S::kStage;
      Left::copy(shared, at, job.left, step * kDepth, job.n_sum);
      Right::copy(shared, at + S::kLeft, job.right, step * kDepth, job.n_sum);
    }
    cp_async_commit();
  };
  // A left operand with a strided inner dimension is read like a right one with a contiguous one, and vice versa:
  // transposing by ldmatrix yields the other operand's order.
  const uint32_t left_at =
      Left::fragment(kLeftAcross ? right_lane<Left::kRow>(lane) : left_lane<Left::kRow>(0, lane), down * S::kBlocks, 0);
  const uint32_t right_at =
      S::kLeft +
      Right::fragment(kRightAcross ? summed_lane<Right::kRow>(lane) : right_lane<Right::kRow>(lane), across * 2, 0);
  float sums[S::kBlocks][4][4] = {};
  FK_UNROLL for (int step = 0; step < S::kStages - 1; ++step) copy(step);
  for (int step = 0; step < n_steps; ++step) {
    cp_async_wait<S::kStages - 2>();
    __syncthreads();  // this step's tiles have arrived; the previous step's are no longer read
    copy(step + S::kStages - 1);
    const uint32_t at = step % S::kStages * S::kStage;
#pragma unroll 2  // full unrolling needs more than the 128 registers that two blocks of 256 threads leave
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t right[2][4];
      FK_UNROLL for (int n = 0; n < 2; ++n) Right::load(right[n], shared, Right::fragment(at + right_at, n, k));
      FK_UNROLL for (int m = 0; m < S::kBlocks; ++m) {
        uint32_t left[4];
        Left::load(left, shared, Left::fragment(at + left_at, m, k));
        FK_UNROLL for (int n = 0; n < 2; ++n) {
          mma<T>(sums[m][2 * n], left, right[n][0], right[n][1]);
          mma<T>(sums[m][2 * n + 1], left, right[n][2], right[n][3]);
        }
      }
    }
  }
  cp_async_wait<0>();
  cp_async_finished();
  FK_UNROLL for (int m = 0; m < S::kBlocks; ++m) FK_UNROLL for (int half = 0; half < 2; ++half) {
    const int row = (down * S::kBlocks + m) * 16 + half * 8 + lane / 4, col = across * 32;
    T* to = row < job.left.n ? job.out + static_cast<int64_t>(row) * job.out_stride + col : nullptr;
    write_row<T, 32>(to, sums[m], half, 1.f, job.right.n - col, lane);
  }
}

// --- fused multiply-adds ---------------------------------------------------------------------------------------------

constexpr int kSide = 64;  // rows and columns of a block's result; a thread has 8 by 4 of them
constexpr int kStep = 16;  // length of a tile along the inner dimension
constexpr int kSimpleThreads = 128;
constexpr int kPitch = kSide / 4 + 1;  // Fours per step, plus one to avoid bank conflicts

using Four = Pack<float, 4>;

// A thread's share of a tile, on its way through registers: 4 rows or columns at one index of the inner dimension.
struct Fetched {
  static constexpr int kShare = kSide / 4 * kStep / kSimpleThreads;
  Four values[kShare];

  // Neighbouring threads read along the inner dimension if it is contiguous, else across it.
  static __device__ int step_of(int i, bool along) { return along ? i % kStep : i / (kSide / 4); }
  static __device__ int four_of(int i, bool along) { return along ? i / kStep : i % (kSide / 4); }

  template <class T>
  __device__ __forceinline__ void read(const Operand<T>& from, int first, int n_sum) {
    const bool along = from.sum_stride == 1;
#pragma unroll
    for (int p = 0; p < kShare; ++p) {
      const int i = p * kSimpleThreads + threadIdx.x, step = first + step_of(i, along), own = four_of(i, along) * 4;
      const T* at = from.data + own * from.own_stride + step * from.sum_stride;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        values[p].values[j] = own + j < from.n && step < n_sum ? to_float(at[j * from.own_stride]) : 0.f;
    }
  }
  template <class Tile>
  __device__ __forceinline__ void write(Tile& tile, bool along) const {
#pragma unroll
    for (int p = 0; p < kShare; ++p) {
      const int i = p * kSimpleThreads + threadIdx.x;
      tile[step_of(i, along) * kPitch + four_of(i, along)] = values[p];
    }
  }
};

template <class T, class Args>
__global__ void __launch_bounds__(kSimpleThreads) simple_kernel(const Args a, const Grid grid) {
  FK_SHARED(Four, left, kStep * kPitch);
  FK_SHARED(Four, right, kStep * kPitch);
  Job<T> job;
  if (!find_job<kSide, kSide>(a, grid, job)) return;
  const int down = threadIdx.x / 16, across = threadIdx.x % 16;
  float sums[8][4] = {};
  Fetched of_left, of_right;
  of_left.read(job.left, 0, job.n_sum);
  of_right.read(job.right, 0, job.n_sum);
  for (int first = 0; first < job.n_sum; first += kStep) {
    of_left.write(left, job.left.sum_stride == 1);
    of_right.write(right, job.right.sum_stride == 1);
    __syncthreads();
    of_left.read(job.left, first + kStep, job.n_sum);
    of_right.read(job.right, first + kStep, job.n_sum);
#pragma unroll
    for (int s = 0; s < kStep; ++s) {
      const Four l[2] = {left[s * kPitch + down * 2], left[s * kPitch + down * 2 + 1]};
      const Four r = right[s * kPitch + across];
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(l[i / 4].values[i % 4], r.values[j], sums[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = down * 8 + i, col = across * 4 + j;
      if (row < job.left.n && col < job.right.n)
        job.out[static_cast<int64_t>(row) * job.out_stride + col] = from_float<T>(sums[i][j]);
    }
}

// --- launches --------------------------------------------------------------------------------------------------------

constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// An upper bound on the number of tiles with `rows` rows, for any group sizes. The rows in no group count as one more
// group.
Grid grid_of(const GroupedMm& a, int rows, int columns) {
  const int64_t some = min(static_cast<int64_t>(a.n_groups) + 1, static_cast<int64_t>(a.n_rows));
  return Grid{static_cast<int>((a.n_rows + some * (rows - 1)) / rows),  // in each group all tiles but one are full
              static_cast<int>(divide_up(a.n_out, columns))};
}
int64_t grids(const GroupedMm&) { return 1; }

Grid grid_of(const GroupedMmGradient& a, int rows, int columns) {
  return Grid{static_cast<int>(divide_up(a.n_a, rows)), static_cast<int>(divide_up(a.n_b, columns))};
}
int64_t grids(const GroupedMmGradient& a) { return a.n_groups; }

template <class Args>
cudaError_t launch_on(void (*kernel)(Args, Grid), const Args& a, int rows, int columns, int threads, size_t shared,
                      cudaStream_t stream) {
  const Grid grid = grid_of(a, rows, columns);
  const int64_t tiles = static_cast<int64_t>(grid.down) * grid.across;
  if (tiles > kMaxBlocks / grids(a)) return cudaErrorInvalidConfiguration;
  const cudaError_t error = allow_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(tiles * grids(a))), dim3(threads), shared, stream, a, grid);
}

template <class T, class S, bool kLeftAcross, bool kRightAcross, class Args>
cudaError_t launch_tiles(const Args& a, cudaStream_t stream) {
  const auto kernel = tiles_kernel<T, S, kLeftAcross, kRightAcross, Args>;
  return launch_on(kernel, a, S::kRows, kColumns, S::kThreads, S::kShared, stream);
}

template <class Args>
cudaError_t launch_simple(const Args& a, cudaStream_t stream) {
  return with_type(a.type, [&](auto type) {
    return launch_on(simple_kernel<FK_TYPE(type), Args>, a, kSide, kSide, kSimpleThreads, 0, stream);
  });
}

using Most = Shape<128, 2, 3>;
using Some = Shape<64, 1, 3>;
using Few = Shape<16, 1, 4>;

// Calls f(Tag<T>) for a 16-bit type.
template <class F>
cudaError_t with_half(Dtype type, F&& f) {
  return type == Dtype::bf16 ? f(Tag<__nv_bfloat16>{}) : f(Tag<__half>{});
}

}  // namespace

cudaError_t grouped_mm(const GroupedMm& a, cudaStream_t stream) {
  const int64_t* w = a.weight_strides;
  const bool across = w[2] == 1, along = !across && w[1] == 1;
  const bool in_tiles = a.type != Dtype::f32 && a.n_in % 8 == 0 && a.n_out % 8 == 0 && a.x_strides[1] == 1 &&
                        (across || along) && aligned(a.x, a.type, {a.x_strides[0]}) &&
                        aligned(a.weight, a.type, {w[0], across ? w[1] : w[2]}) && aligned(a.y);
  if (!in_tiles) return launch_simple(a, stream);
  return with_half(a.type, [&](auto type) {
    using T = FK_TYPE(type);
    const auto of_shape = [&](auto shape) {
      using S = FK_TYPE(shape);
      return across ? launch_tiles<T, S, false, true>(a, stream) : launch_tiles<T, S, false, false>(a, stream);
    };
    const int rows = a.n_rows / a.n_groups;  // average rows per group
    return rows <= 16 ? of_shape(Tag<Few>{}) : rows <= 64 ? of_shape(Tag<Some>{}) : of_shape(Tag<Most>{});
  });
}

cudaError_t grouped_mm_gradient(const GroupedMmGradient& a, cudaStream_t stream) {
  const bool in_tiles = a.type != Dtype::f32 && a.n_a % 8 == 0 && a.n_b % 8 == 0 && a.a_strides[1] == 1 &&
                        a.b_strides[1] == 1 && aligned(a.a, a.type, {a.a_strides[0]}) &&
                        aligned(a.b, a.type, {a.b_strides[0]}) && aligned(a.out);
  if (!in_tiles) return launch_simple(a, stream);
  return with_half(a.type, [&](auto type) { return launch_tiles<FK_TYPE(type), Most, true, true>(a, stream); });
}

}  // namespace cuda
}  // namespace foundry
