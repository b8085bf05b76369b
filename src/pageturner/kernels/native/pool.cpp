#include "pool.h"

#include <pthread.h>

#include <chrono>

namespace pt {
namespace {

std::atomic<unsigned> forks{0};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns when `value` is no longer `old`.
void await(const std::atomic<uint32_t>& value, uint32_t old) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 64; i++) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() - start < std::chrono::microseconds(50));
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads), fork_count_(forks.load()) {
  static const int hook = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)hook;
  for (int i = 1; i < size_; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  if (forked()) {  // the workers stayed behind in the parent
    for (auto& t : workers_) t.detach();
    return;
  }
  stop_.store(true);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (auto& t : workers_) t.join();
}

// In a forked child there are no workers: the caller works alone, with the same results.
bool Pool::forked() const { return forks.load(std::memory_order_relaxed) != fork_count_; }

void Pool::launch(Call call, void* data) {
  std::lock_guard lock(one_run_);
  active_ = size();
  if (active_ > 1) {
    call_ = call, data_ = data;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }
  call(data, 0);
  barrier();
}

void Pool::work(int index) {
  for (uint32_t seen = 0;; seen++) {
    await(epoch_, seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    call_(data_, index);
    barrier();
  }
}

void Pool::barrier() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < active_) return await(phase_, phase);
  arrived_.store(0, std::memory_order_relaxed);
  next_[(phase + 2) % 3].store(0, std::memory_order_relaxed);
  phase_.store(phase + 1, std::memory_order_release);
  if (active_ > 1) phase_.notify_all();
}

}  // namespace pt
