// While guarding is on, every CPU tensor ends at an unmapped page: an access past its end is a fault, which the
// scheduler of kernels reports. (Up to 15 bytes of padding keep tensors aligned.)
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

namespace {

class GuardedAllocator : public c10::Allocator {
 public:
  explicit GuardedAllocator(c10::Allocator* plain) : plain_(plain) {}
  bool on = false;

  c10::DataPtr allocate(size_t n) override {
    if (!on || n == 0) return plain_->allocate(n);
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), padded = (n + 15) / 16 * 16;
    const size_t mapped = (padded + page - 1) / page * page, total = mapped + 2 * page;
    char* base = static_cast<char*>(mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base == MAP_FAILED || mprotect(base + page, mapped, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    char* data = base + page + mapped - padded;
    const std::lock_guard<std::mutex> lock(mutex());
    blocks()[data] = {base, total};
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

 private:
  // Memory of either kind: torch frees by this what it allocated before guarding was on, too.
  static void release(void* data);
  static std::mutex& mutex() {
    static std::mutex m;
    return m;
  }
  static std::unordered_map<void*, std::pair<void*, size_t>>& blocks() {
    static auto* map = new std::unordered_map<void*, std::pair<void*, size_t>>();
    return *map;
  }
  c10::Allocator* plain_;
};

GuardedAllocator& guarded() {
  static GuardedAllocator* allocator = [] {
    auto* created = new GuardedAllocator(c10::GetAllocator(c10::DeviceType::CPU));
    c10::SetAllocator(c10::DeviceType::CPU, created, /*priority=*/100);
    return created;
  }();
  return *allocator;
}

void GuardedAllocator::release(void* data) {
  std::unique_lock<std::mutex> lock(mutex());
  const auto found = blocks().find(data);
  if (found == blocks().end()) {
    lock.unlock();
    return guarded().plain_->raw_deleter()(data);
  }
  munmap(found->second.first, found->second.second);
  blocks().erase(found);
}

void guard(bool on) { guarded().on = on; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(foundry_kernels_cuda_on_cpu, m) {
  m.def("guard(bool on) -> ()");
  m.impl("guard", c10::DispatchKey::CompositeExplicitAutograd, &guard);
}
