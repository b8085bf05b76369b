// Threads that help their caller with loops. The caller never waits for a thread to arrive, only for pieces
// of work that were begun: on cores shared with other processes a helper may be off the core at any time.
// Waiting means spinning for at most about 50 us, then sleeping, so that others get their share.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace pt {

// For a thread that spins: lets the other thread of its core have it.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int threads);  // the caller and threads - 1 helpers
  ~Pool();
  int size() const { return forked() ? 1 : size_; }
  // Helper i stays on cores[i % count]. The caller is left where it is: whatever it starts later would
  // inherit its core. Throws std::system_error where a core may not be used.
  void pin(const std::vector<int>& cores);

  // body(begin, end, thread) over pieces of 0 .. count-1 of at most `grain`, each given to whoever asks next;
  // returns when all are done. One caller at a time.
  template <class F>
  void split(int count, int grain, F&& body) {
    if (count > grain && size() > 1)
      return share(
          count, grain,
          [](void* f, int begin, int end, int thread) {
            (*static_cast<std::remove_reference_t<F>*>(f))(begin, end, thread);
          },
          &body);
    for (int at = 0; at < count; at += grain) body(at, at + grain < count ? at + grain : count, 0);
  }

 private:
  using Call = void (*)(void*, int, int, int);
  // A loop being worked on. Helpers may read a slot that is being reused; what they read counts only if they
  // then claim a piece of that very generation, in one compare-and-swap on state_.
  struct alignas(64) Loop {
    std::atomic<Call> call{nullptr};
    std::atomic<void*> body{nullptr};
    std::atomic<int> count{0}, grain{1};
    std::atomic<int> left{0};  // indices not done yet
  };

  bool forked() const;
  void share(int count, int grain, Call, void* body);
  void help(int thread);
  void work(int thread);

  const int size_;
  const unsigned fork_count_;
  std::vector<std::thread> helpers_;
  Loop loops_[4];                               // of generation g: g % 4
  alignas(64) std::atomic<uint64_t> state_{0};  // generation << 32 | next index to give out
  std::atomic<uint32_t> published_{0};          // the generation again: what idle helpers wait for
  std::atomic<bool> stop_{false};
};

}  // namespace pt
