// Small kernels of csrc/cuda/hopper, right ones: each holds one layout or one order to what a GPU does. run_sample
// returns the checker's report, "" if there is none. nvcc compiles all of it as well, and then run_sample wants
// pointers to a GPU's memory. The wrong ones are in hopper_mistakes.cu.
#include "../../../csrc/cuda/hopper/products.cuh"
#include "include/hopper_report.h"

#include <stdexcept>
#include <string>

namespace {

using namespace foundry::cuda;
using namespace foundry::cuda::hopper;
using foundry::Dtype;
using bf16 = __nv_bfloat16;
using f16 = __half;

struct Lane {
  int warp, lane, g, c;
  __device__ Lane() : warp(threadIdx.x % 128 / 32), lane(threadIdx.x % 32), g(lane / 4), c(lane % 4) {}
  __device__ int row(int e) const { return 16 * warp + g + e / 2 % 2 * 8; }
  __device__ int column(int e) const { return e / 4 * 8 + 2 * c + e % 2; }
};

template <int kColumns, int kCount>
__device__ void put(float* out, const float (&d)[kCount]) {
  const Lane at;
  FK_UNROLL for (int e = 0; e < kCount; ++e) out[at.row(e) * kColumns + at.column(e)] = d[e];
}

__device__ void make_barrier(uint32_t barrier, int arrivals = 1) {
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, arrivals);
    mbarrier_init_fence();
  }
  __syncthreads();
}

// --- copies ----------------------------------------------------------------------------------------------------------

// Two boxes beside each other, at this place of the tensor; out: the words as they lie.
__global__ void box(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap, const uint16_t*, float* out,
                    int column, int token, int head, int batch) {
  FK_HOPPER_SHARED(shared);
  constexpr int kBytes = 64 * kPanelBytes;
  const uint32_t barrier = shared + 2 * kBytes;
  make_barrier(barrier);
  if (threadIdx.x == 0) {
    tma_prefetch_map(&a);
    mbarrier_expect(barrier, 2 * kBytes);
    for (int panel = 0; panel < 2; ++panel)
      tma_load(shared + panel * kBytes, &a, barrier, column + panel * kPanel, token, head, batch);
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < 2 * kBytes / 4; i += 128) reinterpret_cast<int*>(out)[i] = load_shared(shared + 4 * i);
}

// A ring of two stages that 16 boxes of 8 rows, and 64 floats each, pass; out: the sums of both.
__global__ void ring(const __grid_constant__ TensorMap, const __grid_constant__ TensorMap b, const uint16_t* a,
                     float* out) {
  FK_HOPPER_SHARED(shared);
  constexpr int kBytes = 8 * kPanelBytes, kTiles = 16;
  const uint32_t rows = shared + 2 * kBytes, full = rows + 2 * 256, empty = full + 16;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 32) {
    if (lane != 0) return;
    for (int i = 0; i < kTiles; ++i) {
      const int stage = i % 2;
      mbarrier_wait(empty + 8 * stage, i / 2 % 2 ^ 1);
      mbarrier_expect(full + 8 * stage, kBytes + 256);
      tma_load(shared + stage * kBytes, &b, full + 8 * stage, 0, 8 * i, 0, 0);
      bulk_load(rows + stage * 256, a + i * 128, 256, full + 8 * stage);
    }
    return;
  }
  for (int i = 0; i < kTiles; ++i) {
    const int stage = i % 2;
    mbarrier_wait(full + 8 * stage, i / 2 % 2);
    float sum = 0.f;
    for (int e = lane; e < kBytes / 4; e += 32) {
      const float2 pair = unpack<bf16>(load_shared(shared + stage * kBytes + 4 * e));
      sum += pair.x + pair.y;
    }
    const float2 pair = load_shared_pair(rows + stage * 256 + 8 * lane);
    float floats = pair.x + pair.y;
    for (int m = 16; m > 0; m /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, m);
      floats += __shfl_xor_sync(0xFFFFFFFFu, floats, m);
    }
    __syncwarp();
    if (lane != 0) continue;
    out[2 * i] = sum;
    out[2 * i + 1] = floats;
    mbarrier_arrive(empty + 8 * stage);
  }
}

// Each block adds 4096 floats, or one stores them: 0, 1/2, 1, ...
enum Way { kAddBulk, kAddFour, kStoreBulk, kStoreFour };
template <Way kWay>
__global__ void sums(const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const uint16_t*,
                     float* out) {
  FK_HOPPER_SHARED(shared);
  constexpr bool kBulk = kWay == kAddBulk || kWay == kStoreBulk;
  for (int r = 0; r < 8; ++r) {
    const int at = r * 512 + threadIdx.x * 4;
    const float v = 0.5f * at;
    if (kBulk) store_shared_four(shared + at * 4, v, v + 0.5f, v + 1.f, v + 1.5f);
    else if (kWay == kAddFour) add_four(out + at, v, v + 0.5f, v + 1.f, v + 1.5f);
    else store_four(out + at, v, v + 0.5f, v + 1.f, v + 1.5f);
  }
  if (!kBulk) return;
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (kWay == kAddBulk) bulk_add(out, shared, 16384);
  else bulk_store(out, shared, 16384);
  bulk_commit();
  bulk_wait_read();
  bulk_wait();
}

// --- products --------------------------------------------------------------------------------------------------------

// out [64, kColumns] = a [64, 128] b [kColumns, 128]^T, both K-major; a in shared memory or in registers.
template <class T, int kColumns, bool kRegisters>
__global__ void __launch_bounds__(128)
    along(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const uint16_t*, float* out) {
  FK_HOPPER_SHARED(left);
  const uint32_t right = left + 2 * 64 * kPanelBytes, barrier = right + 2 * kColumns * kPanelBytes;
  make_barrier(barrier);
  if (threadIdx.x == 0) {
    mbarrier_expect(barrier, 2 * (64 + kColumns) * kPanelBytes);
    for (int panel = 0; panel < 2; ++panel) {
      tma_load(left + panel * 64 * kPanelBytes, &a, barrier, panel * kPanel, 0, 0, 0);
      tma_load(right + panel * kColumns * kPanelBytes, &b, barrier, panel * kPanel, 0, 0, 0);
    }
  }
  mbarrier_wait(barrier, 0);
  const Lane at;
  uint32_t r[32];
  if constexpr (kRegisters) {
    const uint32_t row = 16 * at.warp + at.lane % 16;
    FK_UNROLL for (int k = 0; k < 8; ++k) {
      const uint32_t chunk = k % 4 * 2 + at.lane / 16;
      uint32_t four[4];
      load_matrices(four, left + k / 4 * 64 * kPanelBytes + row * kPanelBytes + (chunk ^ row % 8) * 16);
      FK_UNROLL for (int i = 0; i < 4; ++i) r[4 * k + i] = four[i];
    }
    settle(r);
  }
  float d[kColumns / 2];
  FK_UNROLL for (int e = 0; e < kColumns / 2; ++e) d[e] = 12345.f;  // must not survive
  settle(d);
  wgmma_fence();
  FK_UNROLL for (int k = 0; k < 8; ++k) {
    const uint64_t mb = further(matrix(right), k / 4 * kColumns * kPanelBytes + k % 4 * 32);
    const uint64_t ma = further(matrix(left), k / 4 * 64 * kPanelBytes + k % 4 * 32);
    if constexpr (kRegisters) Wgmma<kColumns>::template registers<T, false>(d, r + 4 * k, mb, k != 0);
    else Wgmma<kColumns>::template shared<T, false, false>(d, ma, mb, k != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  settle(d);
  put<kColumns>(out, d);
}

// out [64, kColumns] = a [64, kDepth] b [kDepth, kColumns]: a in registers, b MN-major in panels of 64 columns.
template <class T, int kDepth, int kColumns>
__global__ void __launch_bounds__(128) across(const __grid_constant__ TensorMap, const __grid_constant__ TensorMap b,
                                              const uint16_t* a, float* out, uint32_t leading, uint32_t stride) {
  FK_HOPPER_SHARED(right);
  constexpr int kPanels = (kColumns + 63) / 64, kBytes = kDepth * kPanelBytes;
  const uint32_t barrier = right + kPanels * kBytes;
  make_barrier(barrier);
  if (threadIdx.x == 0) {
    mbarrier_expect(barrier, kPanels * kBytes);
    for (int panel = 0; panel < kPanels; ++panel)
      tma_load(right + panel * kBytes, &b, barrier, panel * kPanel, 0, 0, 0);
  }
  mbarrier_wait(barrier, 0);
  const Lane at;
  uint32_t r[kDepth / 4];
  FK_UNROLL for (int i = 0; i < kDepth / 4; ++i) r[i] =
      *reinterpret_cast<const uint32_t*>(a + at.row(2 * i) * kDepth + at.column(2 * i));
  float d[kColumns / 2];
  FK_UNROLL for (int e = 0; e < kColumns / 2; ++e) d[e] = 1.f;
  settle(d);
  settle(r);
  const uint64_t m = matrix(right, leading) - (uint64_t(kSwizzleBytes >> 4) << 32) + (uint64_t(stride >> 4) << 32);
  wgmma_fence();
  FK_UNROLL for (int k = 0; k < kDepth / 16; ++k)
      Wgmma<kColumns>::template registers<T, true>(d, r + 4 * k, further(m, k * 2048), true);
  wgmma_commit();
  wgmma_wait<0>();
  settle(d);
  settle(r);
  put<kColumns>(out, d);
}

// out [64, 64] = a [128, 64]^T b [128, 64 ..]: both MN-major, a by store_matrices, b's second panel.
template <class T>
__global__ void __launch_bounds__(128)
    both_across(const __grid_constant__ TensorMap, const __grid_constant__ TensorMap b, const uint16_t* a, float* out) {
  FK_HOPPER_SHARED(left);
  const uint32_t right = left + 128 * kPanelBytes, barrier = right + 128 * kPanelBytes;
  make_barrier(barrier);
  if (threadIdx.x == 0) {
    mbarrier_expect(barrier, 128 * kPanelBytes);
    tma_load(right, &b, barrier, kPanel, 0, 0, 0);
  }
  mbarrier_wait(barrier, 0);
  const Lane at;
  for (int half = 0; half < 2; ++half) {
    const int row = 64 * half + 16 * at.warp + at.lane % 16;
    const uint32_t to = left + row * kPanelBytes + ((at.lane / 16 ^ at.lane % 8) * 16);
    FK_UNROLL for (int k = 0; k < 4; ++k) {
      uint32_t r[4];
      FK_UNROLL for (int i = 0; i < 4; ++i) r[i] =
          *reinterpret_cast<const uint32_t*>(a + (64 * half + at.row(2 * i)) * 64 + 16 * k + at.column(2 * i));
      store_matrices(to ^ k * 32, r);
    }
  }
  fence_proxy_async();
  __syncthreads();
  float d[32];
  wgmma_fence();
  FK_UNROLL for (int k = 0; k < 8; ++k)
      Wgmma<64>::shared<T, true, true>(d, further(matrix(left), k * 2048), further(matrix(right), k * 2048), k != 0);
  wgmma_commit();
  wgmma_wait<0>();
  settle(d);
  put<64>(out, d);
}

// --- registers and launches ------------------------------------------------------------------------------------------

template <int kGroups, int kFewer, int kMore>
__global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    registers(const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const uint16_t*, float* out) {
  if (threadIdx.x < 128) {
    fewer_registers<kFewer>();
    out[threadIdx.x] = 7.f;
  } else {
    more_registers<kMore>();
    out[threadIdx.x] = 3.f * threadIdx.x;
  }
}

// Blocks add to out[1] in the order of their tickets, multiplying what is there; counters: tickets, and whose turn it
// is.
__global__ void turns(const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const uint16_t*,
                      float* out) {
  int* counters = reinterpret_cast<int*>(out + 2);
  launch_dependents();
  wait_for_launch_before();
  if (threadIdx.x != 0) return;
  const int ticket = atomicAdd(counters, 1);
  for (int spin = 0; ticket % 3 == 1 && load_acquire(counters + 1) != ticket; ++spin) {
  }
  wait_until(counters + 1, ticket);
  out[1] = 2.f * out[1] + ticket;
  add_release(counters + 1);
}

// All blocks wait for each other.
__global__ void all_at_once(const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const uint16_t*,
                            float* out) {
  int* arrived = reinterpret_cast<int*>(out);
  if (threadIdx.x != 0) return;
  add_release(arrived);
  wait_until(arrived, gridDim.x);
}

// A tensor [batches, heads, tokens, columns] that lies in a row.
cudaError_t map_of(TensorMap& map, const void* data, bool half, int64_t batches, int64_t heads, int64_t tokens,
                   int64_t columns, int rows) {
  foundry::HeadStrides strides{};
  strides.batch = heads * tokens * columns;
  strides.head = tokens * columns;
  strides.token = columns;
  return encode_map(map, {data, half ? Dtype::f16 : Dtype::bf16, batches, heads, tokens, columns, strides, rows});
}

}  // namespace

// The error of encode_map; of: batches, heads, tokens, columns; strides of token, head, batch; rows.
extern "C" int encode(const void* data, int type, const int64_t* of) {
  TensorMap map{};
  foundry::HeadStrides strides{};
  strides.token = of[4];
  strides.head = of[5];
  strides.batch = of[6];
  return encode_map(map, {data, Dtype(type), of[0], of[1], of[2], of[3], strides, static_cast<int>(of[7])});
}

// a, b: 16-bit numbers; sizes: what the sample is told.
extern "C" const char* run_sample(const char* name, const uint16_t* a, const uint16_t* b, float* out,
                                  const int* sizes) {
  const std::string wanted = name;
  cudaError_t error = cudaErrorInvalidValue;
  TensorMap ma{}, mb{};
  const auto make = [&](bool half, int rows_a, int columns_a, int rows_b, int tokens_b, int columns_b) {
    error = map_of(ma, a, half, 1, 1, rows_a, columns_a, rows_a);
    if (error == cudaSuccess) error = map_of(mb, b, half, 1, 1, tokens_b, columns_b, rows_b);
    return error == cudaSuccess;
  };
  const auto run = [&](auto kernel, unsigned blocks, unsigned threads, auto... more) {
    error = launch_hopper(kernel, dim3(blocks), dim3(threads), 100 << 10, nullptr, false, ma, mb, a, out, more...);
  };
#define ALONG(COLUMNS)                                                                 \
  if (wanted == "along_" #COLUMNS && make(false, 64, 128, COLUMNS, 256, 128))          \
    run(along<bf16, COLUMNS, false>, 1, 128);                                          \
  if (wanted == "along_registers_" #COLUMNS && make(true, 64, 128, COLUMNS, 256, 128)) \
    run(along<f16, COLUMNS, true>, 1, 128);
#define ACROSS(DEPTH, COLUMNS)                                                               \
  if (wanted == "across_" #COLUMNS && make(false, 64, DEPTH, DEPTH, DEPTH, COLUMNS))         \
    run(across<bf16, DEPTH, COLUMNS>, 1, 128, uint32_t(DEPTH* kPanelBytes), uint32_t(1024)); \
  if (wanted == "exchanged_" #COLUMNS && make(false, 64, DEPTH, DEPTH, DEPTH, COLUMNS))      \
    run(across<bf16, DEPTH, COLUMNS>, 1, 128, uint32_t(1024), uint32_t(DEPTH* kPanelBytes));
  return report_of([&] {
    if (wanted == "box") {  // sizes: batches, heads, tokens, columns; column, token, head, batch
      error = map_of(ma, a, false, sizes[0], sizes[1], sizes[2], sizes[3], 64);
      if (error == cudaSuccess) run(box, 1, 128, sizes[4], sizes[5], sizes[6], sizes[7]);
    }
    if (wanted == "ring" && make(false, 64, 128, 8, 128, 64)) run(ring, 1, 64);
    error = wanted == "add_bulk" || wanted == "add_four" || wanted == "store_bulk" || wanted == "store_four" ||
                    wanted == "turns" || wanted == "all_at_once" || wanted.rfind("registers_", 0) == 0
                ? cudaSuccess
                : error;
    if (wanted == "add_bulk") run(sums<kAddBulk>, 24, 128);
    if (wanted == "add_four") run(sums<kAddFour>, 24, 128);
    if (wanted == "store_bulk") run(sums<kStoreBulk>, 24, 128);
    if (wanted == "store_four") run(sums<kStoreFour>, 24, 128);
    if (wanted == "turns") run(turns, 24, 64);
    if (wanted == "all_at_once") run(all_at_once, 4, 64);
    if (wanted == "registers_2") run(registers<2, 24, 240>, 3, 384);
    if (wanted == "registers_3") run(registers<3, 32, 160>, 3, 512);
    ALONG(64)
    ALONG(80)
    ALONG(96)
    ALONG(128)
    ALONG(256)
    ACROSS(128, 64)
    ACROSS(128, 80)
    ACROSS(128, 96)
    ACROSS(128, 128)
    ACROSS(80, 256)
    if (wanted == "both_across" && make(false, 128, 64, 128, 128, 128)) run(both_across<bf16>, 1, 128);
    if (wanted == "both_across_f16" && make(true, 128, 64, 128, 128, 128)) run(both_across<f16>, 1, 128);
    return error;
  });
}
