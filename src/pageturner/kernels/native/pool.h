// A team of threads that runs one function together: the caller and size - 1 workers. Waiting means spinning
// for at most about 50 us, then sleeping, so that other processes get their share of the cores.
#pragma once
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace pt {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  int size() const { return forked() ? 1 : size_; }

  // Runs body(thread index) on every thread; one call at a time, others wait for it.
  template <class F>
  void run(F&& body) {
    launch([](void* f, int i) { (*static_cast<std::remove_reference_t<F>*>(f))(i); }, &body);
  }

  // Inside run, by all threads alike: body(begin, end) over pieces of 0 .. count-1 of at most `grain`, given
  // to whoever asks next; returns when all are done.
  template <class F>
  void split(int count, int grain, F&& body) {
    std::atomic<int>& next = next_[phase_.load(std::memory_order_relaxed) % 3];
    for (int at; (at = next.fetch_add(grain, std::memory_order_relaxed)) < count;)
      body(at, at + grain < count ? at + grain : count);
    barrier();
  }

 private:
  using Call = void (*)(void*, int);
  bool forked() const;
  void launch(Call, void*);
  void work(int index);
  void barrier();

  const int size_;
  const unsigned fork_count_;
  int active_ = 1;  // threads in the current run
  Call call_ = nullptr;
  void* data_ = nullptr;
  std::mutex one_run_;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint32_t> epoch_{0};  // a new run begins, or stop_
  alignas(64) std::atomic<uint32_t> phase_{0};  // barriers passed
  alignas(64) std::atomic<int> arrived_{0};
  // Counter of phase p is p % 3: while one phase counts, the next one's is zero already and the last one's is
  // not looked at by anybody any more.
  struct alignas(64) Counter : std::atomic<int> {};
  Counter next_[3] = {};
  std::atomic<bool> stop_{false};
};

}  // namespace pt
