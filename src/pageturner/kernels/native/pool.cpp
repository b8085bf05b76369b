#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>

namespace pt {
namespace {

std::atomic<unsigned> forks{0};

// Returns when `value` is no longer `old`.
template <class T>
void await(const std::atomic<T>& value, T old) {
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

Pool::Pool(int threads) : size_(std::max(threads, 1)), fork_count_(forks.load()) {
  static const int hook = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)hook;
  for (int i = 1; i < size_; i++) helpers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  if (forked()) {  // the helpers stayed behind in the parent
    for (auto& t : helpers_) t.detach();
    return;
  }
  stop_.store(true);
  published_.fetch_add(1, std::memory_order_release);
  published_.notify_all();
  for (auto& t : helpers_) t.join();
}

void Pool::pin(const std::vector<int>& cores) {
  for (size_t i = 0; i < helpers_.size() && !cores.empty(); i++) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(size_t(cores[(i + 1) % cores.size()]), &set);
    if (const int error = pthread_setaffinity_np(helpers_[i].native_handle(), sizeof set, &set))
      throw std::system_error(error, std::generic_category(), "cannot pin a kernel thread");
  }
}

// In a forked child there are no helpers: the caller works alone, with the same results.
bool Pool::forked() const { return forks.load(std::memory_order_relaxed) != fork_count_; }

void Pool::share(int count, int grain, Call call, void* body) {
  const uint32_t generation = uint32_t(state_.load(std::memory_order_relaxed) >> 32) + 1;
  Loop& loop = loops_[generation % 4];
  loop.call.store(call, std::memory_order_relaxed);
  loop.body.store(body, std::memory_order_relaxed);
  loop.count.store(count, std::memory_order_relaxed);
  loop.grain.store(grain, std::memory_order_relaxed);
  loop.left.store(count, std::memory_order_relaxed);
  state_.store(uint64_t(generation) << 32, std::memory_order_release);
  published_.store(generation, std::memory_order_release);
  published_.notify_all();
  help(0);
  for (int left; (left = loop.left.load(std::memory_order_acquire)) != 0;) await(loop.left, left);
}

// Claims pieces of the present loop until there are none.
void Pool::help(int thread) {
  uint64_t state = state_.load(std::memory_order_acquire);
  const uint64_t generation = state >> 32;
  Loop& loop = loops_[generation % 4];
  const Call call = loop.call.load(std::memory_order_relaxed);
  void* body = loop.body.load(std::memory_order_relaxed);
  const int count = loop.count.load(std::memory_order_relaxed),
            grain = loop.grain.load(std::memory_order_relaxed);
  while (state >> 32 == generation) {
    const int begin = int(uint32_t(state));
    if (begin >= count) return;
    const int end = std::min(begin + grain, count);
    const uint64_t claimed = (generation << 32) | uint32_t(end);
    if (!state_.compare_exchange_weak(state, claimed, std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    call(body, begin, end, thread);
    if (loop.left.fetch_sub(end - begin, std::memory_order_acq_rel) == end - begin) loop.left.notify_all();
    state = state_.load(std::memory_order_acquire);
  }
}

void Pool::work(int thread) {
  for (uint32_t seen = 0;;) {
    await(published_, seen);
    seen = published_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    help(thread);
  }
}

}  // namespace pt
