// One kernel of csrc/cuda/hopper that does all there is to do, and ways to get it wrong: the checker names each.
// run_sample returns the report, "" if there is none. nvcc compiles the kernels as well.
#include "../../../csrc/cuda/hopper/products.cuh"
#include "include/hopper_report.h"

#include <sstream>
#include <stdexcept>
#include <string>

namespace {

using namespace foundry::cuda;
using namespace foundry::cuda::hopper;
using bf16 = __nv_bfloat16;

// An enumeration, and the names of its values.
#define FK_LISTED(...)          \
  enum Mistake { __VA_ARGS__ }; \
  constexpr const char* kMistakes = #__VA_ARGS__

FK_LISTED(kNothing, kOperandInRegisters, kOverlapped,
          // mbarriers
          kNoInit, kInitTwice, kNoInitFence, kNoSyncAfterInit, kNoArrivalsAtAll, kTooManyExpected, kOneWarpArrives,
          kArrivesTwice, kFullNotWaitedFor, kFullOfWrongPhase, kEmptyNotWaitedFor, kEmptyOfWrongPhase, kTriedForEver,
          kMbarrierAsMemory, kMbarrierMisaligned, kInitOfNothing, kTooManyBytes,
          // copies
          kFewerBytesAnnounced, kMoreBytesAnnounced, kLoadTooMany, kBoxMisplaced, kBoxOutside, kMapNotMade,
          kSourceMisaligned, kBytesNotOf16, kSourceOutside, kTouchedInFlight, kPrefetchesNoMap,
          // products
          kNoFence, kNoCommit, kNoWait, kShortWait, kReadEarly, kMaximumEarly, kShuffledEarly, kStoredEarly,
          kWrittenEarly, kReleasedEarly, kOperandChanged, kWeightsWithoutProxyFence, kProxyFenceAfterBarrier,
          kWeightsWithoutBarrier, kWeightsMissing, kWeightsOverwritten, kStrideOf512, kNoSwizzle, kBeginsInARow,
          kLeavesTheRow, kBaseOffset, kAcrossInARow, kPartOfAResult, kAddressTooLarge, kLeadingOf112, kThreeWarps,
          kTwoMatrices, kNeedsNegative, kNeverWaited, kLeavesBeforeProducts,
          // stores
          kStoreWithoutProxyFence, kStoreWithoutBarrier, kStoreNotCommitted, kStoreNotRead, kStoreSourceTouched,
          kStoreOutside, kTurnGivenEarly, kAcquiredWithoutFence,
          // the rest
          kTurnNeverComes, kSpinsForEver, kWordWithoutBarrier, kWordOfAStage, kOutside, kMisaligned,
          kLaneWithoutSyncwarp, kBarrierOf31, kBarrier16, kBarrierMissing);

constexpr int kStages = 2, kTiles = 6, kTile = 64 * kPanelBytes, kGroup = 128;

struct Places {
  uint32_t weights, tiles, results, words, full, empty;
  __device__ explicit Places(uint32_t shared)
      : weights(shared),
        tiles(shared + kTile),
        results(tiles + kStages * kTile),
        words(results + 16384),
        full(words + 512),
        empty(full + 8 * kStages) {}
};

// Loads kTiles tiles [64, 64] of a into a ring.
__device__ void produce(const Places& at, const TensorMap& map, const TensorMap& unmade, const uint16_t* a, Mistake m) {
  for (int i = 0; i < kTiles + (m == kLoadTooMany ? 1 : 0); ++i) {
    const int stage = i % kStages, parity = (i / kStages % 2 ^ 1) ^ (m == kEmptyOfWrongPhase ? 1 : 0);
    const uint32_t full = at.full + 8 * stage, empty = at.empty + 8 * stage;
    while (m == kTriedForEver && !mbarrier_try(full, 0)) {
    }
    if (m == kPrefetchesNoMap) tma_prefetch_map(&unmade);
    if (m != kEmptyNotWaitedFor) mbarrier_wait(empty, parity);
    mbarrier_expect(full, kTile + (m == kFewerBytesAnnounced  ? -1024
                                   : m == kMoreBytesAnnounced ? 16
                                   : m == kTooManyBytes       ? 1 << 20
                                                              : 0));
    if (m == kArrivesTwice) mbarrier_arrive(full);
    uint32_t to = at.tiles + stage * kTile;
    if (m == kBoxMisplaced) to += 128;
    if (m == kBoxOutside) to += 1 << 16;
    if (m == kSourceMisaligned) bulk_load(to, a + 2, kTile, full);
    else if (m == kBytesNotOf16) bulk_load(to, a, kTile + 8, full);
    else if (m == kSourceOutside) bulk_load(to, a + 64 * 64 * kTiles, kTile, full);
    else tma_load(to, m == kMapNotMade ? &unmade : &map, full, 0, 64 * i, 0, 0);
    if (m == kTouchedInFlight) load_shared(to);
  }
}

// Writes the weights [64, 64], b, as a matrix with the swizzle.
__device__ void write_weights(const Places& at, const uint16_t* b, Mistake m) {
  const int thread = threadIdx.x % kGroup;
  for (int i = thread; i < 64 * 8 - (m == kWeightsMissing ? 1 : 0); i += kGroup) {
    const int row = i / 8, chunk = i % 8;
    const float4 v = *reinterpret_cast<const float4*>(b + 8 * i);
    store_shared_four(at.weights + row * kPanelBytes + (chunk ^ row % 8) * 16, v.x, v.y, v.z, v.w);
  }
  if (m != kWeightsWithoutProxyFence && m != kProxyFenceAfterBarrier) fence_proxy_async();
  if (m != kWeightsWithoutBarrier) FK_NAMED_BARRIER(1, kGroup);
  if (m == kProxyFenceAfterBarrier) fence_proxy_async();
}

// d += tile weights^T, by one group of products.
__device__ void multiply(float (&d)[32], uint32_t (&r)[16], const Places& at, uint32_t tile, bool registers,
                         Mistake m) {
  const int warp = threadIdx.x % kGroup / 32, lane = threadIdx.x % 32, row = 16 * warp + lane % 16;
  if (registers) {
    FK_UNROLL for (int k = 0; k < 4; ++k) {
      uint32_t four[4];
      load_matrices(four, tile + row * kPanelBytes + ((2 * k + lane / 16) ^ row % 8) * 16);
      FK_UNROLL for (int i = 0; i < 4; ++i) r[4 * k + i] = four[i];
    }
    settle(r);
  }
  if (m != kOverlapped && m != kShortWait) settle(d);
  if (m != kNoFence) wgmma_fence();
  uint64_t a = matrix(tile), b = matrix(at.weights);
  if (m == kStrideOf512) b -= uint64_t(512 >> 4) << 32;
  if (m == kNoSwizzle) b -= uint64_t(1) << 62;
  if (m == kBeginsInARow) b = matrix(at.weights + 128);
  if (m == kLeavesTheRow) b = further(b, 112);
  if (m == kBaseOffset) b += uint64_t(1) << 49;
  if (m == kAddressTooLarge) b += 1 << 14;
  if (m == kAcrossInARow) return Wgmma<64>::shared<bf16, false, true>(d, a, further(b, 16), true);
  if (m == kLeadingOf112 || m == kPartOfAResult) {
    float wide[64] = {};
    Wgmma<128>::shared<bf16, false, true>(wide, a, matrix(at.weights, m == kLeadingOf112 ? 112 : 1024), false);
    return Wgmma<64>::shared<bf16, false, false>(*reinterpret_cast<float (*)[32]>(wide + 32), a, b, true);
  }
  if (m == kTwoMatrices && threadIdx.x % kGroup == 37) a = further(a, 32);
  if (m == kThreeWarps && warp == 3) return wgmma_commit();
  FK_UNROLL for (int k = 0; k < 4; ++k) {
    if (registers) Wgmma<64>::registers<bf16, false>(d, r + 4 * k, further(b, 32 * k), true);
    else Wgmma<64>::shared<bf16, false, false>(d, further(a, 32 * k), further(b, 32 * k), true);
  }
  if (m != kNoCommit) wgmma_commit();
}

// Multiplies the tiles by the weights; out: the sum, register by register.
__device__ void consume(const Places& at, const uint16_t* b, float* out, int* turn, Mistake m) {
  const int thread = threadIdx.x % kGroup, lane = thread % 32;
  float d[32];
  uint32_t r[16];
  FK_UNROLL for (int e = 0; e < 32; ++e) d[e] = 0.f;
  FK_UNROLL for (int i = 0; i < 16; ++i) r[i] = 0;
  const bool registers = m == kOperandInRegisters || m == kOperandChanged || m == kLaneWithoutSyncwarp;
  write_weights(at, b, m);
  for (int i = 0; i < kTiles; ++i) {
    const int stage = i % kStages;
    const uint32_t full = at.full + 8 * stage, empty = at.empty + 8 * stage, tile = at.tiles + stage * kTile;
    if (m != kFullNotWaitedFor) mbarrier_wait(full, i / kStages % 2 ^ (m == kFullOfWrongPhase ? 1 : 0));
    multiply(d, r, at, tile, registers, m);
    if (m == kLeavesBeforeProducts && lane == 7) return;
    if (m == kReadEarly) out[thread] = exp2_fast(d[3] * 0.5f - 1.f);
    if (m == kMaximumEarly) out[thread] = fmaxf(d[3], 1.f);
    if (m == kShuffledEarly) out[thread] = __shfl_xor_sync(0xFFFFFFFFu, d[3], 1);
    if (m == kStoredEarly) store_shared_four(at.results + 16 * thread, 0.f, 1.f, 2.f, d[3]);
    if (m == kWrittenEarly && thread == 9) d[5] = 0.f;
    if (m == kOperandChanged && thread == 9) r[6] += 1;
    if (m == kWeightsOverwritten && thread == 0) clear_shared_16(at.weights);
    if (m == kReleasedEarly && lane == 0) mbarrier_arrive(empty);
    if (m == kNeverWaited && i == kTiles - 1) return;
    if (m == kOverlapped && i > 0) {  // the product before this one has ended: its stage is free
      wgmma_wait<1>();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(at.empty + 8 * (stage ^ 1));
    }
    if (m == kOverlapped && i < kTiles - 1) continue;
    if (m == kShortWait) wgmma_wait<1>();
    else if (m != kNoWait) wgmma_wait<0>();
    if (m != kShortWait) {
      settle(d);
      settle(r);
    }
    if (m != kLaneWithoutSyncwarp) __syncwarp();
    const bool arrives = m == kOneWarpArrives ? thread == 0 : lane == 0;
    if (m != kReleasedEarly && m != kNoArrivalsAtAll && arrives) mbarrier_arrive(empty);
  }
  if (m == kNeedsNegative) needed_before_wait(-1.f, at.words);
  FK_UNROLL for (int j = 0; j < 8; ++j)
      store_shared_four(at.results + (j * kGroup + thread) * 16, d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
  if (m != kStoreWithoutProxyFence) fence_proxy_async();
  if (m != kStoreWithoutBarrier) FK_NAMED_BARRIER(1, kGroup);
  if (thread != 0) return;
  wait_until(turn, m == kTurnNeverComes ? 7 : 0);
  while (m == kSpinsForEver && load_acquire(turn) != 7) {
  }
  if (m != kAcquiredWithoutFence) fence_proxy_async_global();
  bulk_store(m == kStoreOutside ? out + 16 : out, at.results, 16384);
  if (m != kStoreNotCommitted) bulk_commit();
  if (m == kStoreSourceTouched) clear_shared_16(at.results + 64);
  if (m == kStoreNotRead) return;
  bulk_wait_read();
  if (m == kTurnGivenEarly) add_release(turn);
  bulk_wait();
  if (m != kStoreNotCommitted) add_release(turn);
}

// Words in shared memory by ordinary accesses of both warpgroups.
__device__ void exchange(const Places& at, float* out, Mistake m) {
  const int thread = threadIdx.x;
  if (thread < 64)
    store_shared(at.words + 4 * thread + (m == kMisaligned ? 2 : 0) + (m == kOutside ? 1 << 20 : 0), thread);
  if (m == kBarrierOf31) FK_NAMED_BARRIER(2, 31);
  if (m == kBarrier16) FK_NAMED_BARRIER(16, 256);
  if (m == kBarrierMissing && thread >= 32 && thread < 64) return;
  if (m != kWordWithoutBarrier) FK_NAMED_BARRIER(2, 256);
  const int v = load_shared(at.words + 4 * (63 - thread % 64));
  if (m == kMbarrierAsMemory) load_shared(at.full + 4);
  if (m == kMbarrierMisaligned) mbarrier_arrive(at.full + 4);
  if (m == kWordOfAStage) load_shared(at.tiles);
  if (v != 63 - thread % 64) out[0] = -1.f;
}

__global__ void __launch_bounds__(256, 1)
    pipeline(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap unmade, const uint16_t* a,
             const uint16_t* b, float* out, int* turn, Mistake m) {
  FK_HOPPER_SHARED(shared);
  const Places at(shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages && m != kNoInit; ++stage) {
      mbarrier_init(at.full + 8 * stage, 1);
      mbarrier_init((m == kInitTwice ? at.full : at.empty) + 8 * stage, m == kInitOfNothing     ? 0
                                                                        : m == kTooManyExpected ? 8
                                                                        : m == kOneWarpArrives  ? 1
                                                                                                : 4);
    }
    if (m != kNoInitFence) mbarrier_init_fence();
  }
  if (m != kNoSyncAfterInit) {
    __syncthreads();
    exchange(at, out, m);
  }
  if (threadIdx.x >= kGroup) consume(at, b, out, turn, m);
  else if (threadIdx.x == 0) produce(at, map, unmade, a, m);
}

// The first of three warpgroups gives up registers, the others want more: 168 has each to begin with.
template <int kFewer, int kMore>
__global__ void __launch_bounds__(384, 1) budget() {
  if (threadIdx.x < 128) fewer_registers<kFewer>();
  else more_registers<kMore>();
}

__global__ void old_shared(float* out) {
  FK_SHARED(float, shared, 64);
  shared[threadIdx.x] = 1.f;
  out[threadIdx.x] = shared[threadIdx.x];
}
template <bool kWaits>
__global__ void nothing_early(float* out) {
  launch_dependents();
  if (kWaits) wait_for_launch_before();
  out[threadIdx.x] = 1.f;
}
__global__ void not_launched_by_launch_hopper(float* out) {
  FK_HOPPER_SHARED(shared);
  store_shared(shared, 1);
  out[0] = float(load_shared(shared));
}

cudaError_t run(const std::string& wanted, const uint16_t* a, const uint16_t* b, float* out, int* turn) {
  const auto registers = [](void (*kernel)()) { return launch_hopper(kernel, dim3(2), dim3(384), 0, nullptr, false); };
  if (wanted == "registers") return registers(budget<24, 240>);
  if (wanted == "registers_too_many") return registers(budget<40, 240>);
#if defined(FK_CUDA_ON_CPU)  // nvcc knows
  if (wanted == "registers_odd") return registers(budget<100, 168>);
  if (wanted == "registers_wrong_way") return registers(budget<240, 168>);
#endif
  if (wanted == "old_shared") return launch_hopper(old_shared, dim3(1), dim3(64), 0, nullptr, false, out);
  if (wanted == "early_without_wait")
    return launch_hopper(nothing_early<false>, dim3(2), dim3(64), 0, nullptr, true, out);
  if (wanted == "early") return launch_hopper(nothing_early<true>, dim3(2), dim3(64), 0, nullptr, true, out);
  if (wanted == "not_launched_by_launch_hopper")
    return foundry::launch(not_launched_by_launch_hopper, dim3(1), dim3(32), 1024, nullptr, out);
  if (wanted == "too_much_shared_memory")
    return launch_hopper(old_shared, dim3(1), dim3(64), (227 << 10) + 1, nullptr, false, out);
  TensorMap map{}, unmade{};
  foundry::HeadStrides strides{};
  strides.token = 64;
  const cudaError_t error = encode_map(map, {a, foundry::Dtype::bf16, 1, 1, 64 * kTiles, 64, strides, 64});
  if (error != cudaSuccess) return error;
  std::istringstream names(kMistakes);
  std::string name;
  for (int i = 0; std::getline(names >> std::ws, name, ','); ++i)
    if (wanted == name)
      return launch_hopper(pipeline, dim3(1), dim3(256), 64 << 10, nullptr, false, map, unmade, a, b, out, turn,
                           Mistake(i));
  return cudaErrorInvalidValue;
}

}  // namespace

// a: 6 tiles [64, 64] of bfloat16, b: one; out: 4096 floats; turn: a zero.
extern "C" const char* run_sample(const char* name, const uint16_t* a, const uint16_t* b, float* out, int* turn) {
  return report_of([&] { return run(name, a, b, out, turn); });
}
