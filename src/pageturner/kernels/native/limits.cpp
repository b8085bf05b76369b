#include "limits.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "memory.h"

namespace pt {
namespace {

// Loops in assembly, each of `n` times 12 instructions (or pairs) that do not depend on each other: what a
// compiler makes of intrinsics keeps such accumulators in memory now and then. Only registers 0 to 15 are
// used, so that this file needs no flags of an instruction set.
#define PT_TWELVE(f) f("0") f("1") f("2") f("3") f("4") f("5") f("6") f("7") f("8") f("9") f("10") f("11")
#define PT_EIGHT(f) f("0") f("1") f("2") f("3") f("4") f("5") f("6") f("7")

#if defined(__x86_64__)
#define PT_VECTORS                                                                                           \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
      "xmm13", "xmm14"
#define PT_ZERO(n) "vxorps %%xmm" n ", %%xmm" n ", %%xmm" n "\n\t"  // and the upper lanes
#define PT_LOOP(body)                                                                      \
  asm volatile(PT_TWELVE(PT_ZERO) PT_ZERO("12")                                            \
                   PT_ZERO("13") "1:\n\t" PT_TWELVE(body) "dec %0\n\tjnz 1b\n\tvzeroupper" \
               : "+r"(n)                                                                   \
               :                                                                           \
               : PT_VECTORS, "cc")
#define PT_DOT512(r) "vpdpbusd %%zmm12, %%zmm13, %%zmm" r "\n\t"
#define PT_DOT256(r) "vpdpbusd %%ymm12, %%ymm13, %%ymm" r "\n\t"
#define PT_DOTVEX(r) "%{vex%} vpdpbusd %%ymm12, %%ymm13, %%ymm" r "\n\t"
#define PT_MADD(r) "vpmaddubsw %%ymm12, %%ymm13, %%ymm14\n\tvpaddw %%ymm14, %%ymm" r ", %%ymm" r "\n\t"
#define PT_FMA512(r) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" r "\n\t"
#define PT_FMA256(r) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" r "\n\t"
void dot512(int64_t n) { PT_LOOP(PT_DOT512); }
void dot256(int64_t n) { PT_LOOP(PT_DOT256); }
#ifdef PT_HAVE_AVXVNNI  // an older assembler does not know it either
void dot_vex(int64_t n) { PT_LOOP(PT_DOTVEX); }
#endif
void madd(int64_t n) { PT_LOOP(PT_MADD); }
void fma512(int64_t n) { PT_LOOP(PT_FMA512); }
void fma256(int64_t n) { PT_LOOP(PT_FMA256); }
#define PT_READ(vector, bytes)                                                           \
  asm volatile("1:\n\t" vector "dec %1\n\tlea " bytes "(%0), %0\n\tjnz 1b\n\tvzeroupper" \
               : "+r"(p), "+r"(n)                                                        \
               :                                                                         \
               : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "cc", "memory")
#define PT_LOAD512(r) "vmovaps 64*" r "(%0), %%zmm" r "\n\t"
#define PT_LOAD256(r) "vmovaps 32*" r "(%0), %%ymm" r "\n\t"
void read512(const uint8_t* p, int64_t n) { PT_READ(PT_EIGHT(PT_LOAD512), "512"); }
void read256(const uint8_t* p, int64_t n) {
  n *= 2;
  PT_READ(PT_EIGHT(PT_LOAD256), "256");
}
#elif defined(__aarch64__)
#define PT_LOOP(body)                                                                                    \
  asm volatile(".arch armv8.2-a+dotprod\n\tmovi v12.4s, #0\n\tmovi v13.4s, #0\n\t1:\n\t" PT_TWELVE(      \
                   body) "subs %0, %0, #1\n\tb.ne 1b"                                                    \
               : "+r"(n)                                                                                 \
               :                                                                                         \
               : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", \
                 "cc")
#define PT_SDOT(r) "sdot v" r ".4s, v12.16b, v13.16b\n\t"
#define PT_FMLA(r) "fmla v" r ".4s, v12.4s, v13.4s\n\t"
void sdot(int64_t n) { PT_LOOP(PT_SDOT); }
void fmla(int64_t n) { PT_LOOP(PT_FMLA); }
#endif

typedef uint64_t Pair __attribute__((vector_size(16)));

// n times 512 bytes.
void read_plain(const uint8_t* p, int64_t n) {
  Pair sum[4] = {};
  for (const uint8_t* end = p + 512 * n; p < end; p += 64)
    for (int i = 0; i < 4; i++) sum[i] ^= reinterpret_cast<const Pair*>(p)[i];
  Pair all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  asm volatile("" : : "m"(all));
}

// The loops of an instruction set, and how many operations 12 of its instructions are.
struct Loops {
  void (*integer)(int64_t);
  void (*floats)(int64_t);
  void (*read)(const uint8_t*, int64_t);
  int integer_ops, float_ops;
};

Loops loops_of(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512vnni" || isa == "amx") return {dot512, fma512, read512, 12 * 128, 12 * 32};
  if (isa == "avx512vnni256") return {dot256, fma256, read256, 12 * 64, 12 * 16};
#ifdef PT_HAVE_AVXVNNI
  if (isa == "avxvnni") return {dot_vex, fma256, read256, 12 * 64, 12 * 16};
#endif
  if (isa == "avx2") return {madd, fma256, read256, 12 * 64, 12 * 16};
#elif defined(__aarch64__)
  if (isa.rfind("neon", 0) == 0) return {sdot, fmla, read_plain, 12 * 32, 12 * 8};
#endif
  (void)isa;
  return {nullptr, nullptr, read_plain, 0, 0};
}

double now(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Waits until all threads are here, again and again. Yields: there may be more threads than cores.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void wait() {
    const int turn = turn_.load();
    if (here_.fetch_add(1) + 1 == size_) {
      here_.store(0);
      turn_.fetch_add(1);
    } else {
      while (turn_.load() == turn) std::this_thread::yield();
    }
  }

 private:
  const int size_;
  std::atomic<int> here_{0}, turn_{0};
};

// When a thread began and ended by the clock of all, and how long it was on a core.
struct Span {
  double begin, end, own;
};

// So much stays in the caches that a core has for itself.
constexpr size_t kOwnCache = size_t(512) << 10;

}  // namespace

double measure_limit(const std::string& isa, Limit what, int threads, size_t bytes, double seconds) {
  const Loops loops = loops_of(isa);
  const bool memory = what == Limit::Read || what == Limit::Copy;
  const int ops = what == Limit::Integer ? loops.integer_ops : loops.float_ops;
  if (!memory && ops == 0) return 0;
  threads = std::max(threads, 1);
  bytes = round_up(std::max<size_t>(bytes, 1024), 1024);
  const double unit = what == Limit::Copy ? double(bytes / 2) : memory ? double(bytes) : 1000.0 * ops;
  // What threads do not share is measured by the time that each was given: other processes do not count.
  const bool alone = threads == 1 || !memory || bytes <= kOwnCache;
  std::vector<Span> spans(threads);
  std::vector<Buffer> buffers;  // taken here, where it can be refused; first touched by their threads
  for (int i = 0; memory && i < threads; i++) buffers.emplace_back(bytes);
  if (!memory) buffers.resize(threads);
  Barrier barrier(threads);
  int units = 1;
  double best = 0;
  bool done = false;
  const double stop = now(CLOCK_MONOTONIC) + seconds;

  const auto work = [&](int thread) {
    uint8_t* const data = buffers[thread].data();
    if (memory) std::memset(data, 1, bytes);  // untouched zeros would all be one page
    const auto once = [&] {
      if (what == Limit::Integer) return loops.integer(1000);
      if (what == Limit::Float) return loops.floats(1000);
      if (what == Limit::Read) return loops.read(data, int64_t(bytes / 512));
      std::memcpy(data, data + bytes / 2, bytes / 2);
      asm volatile("" : : "r"(data) : "memory");
    };
    for (once();;) {
      barrier.wait();
      Span& mine = spans[thread];
      mine.begin = now(CLOCK_MONOTONIC), mine.own = now(CLOCK_THREAD_CPUTIME_ID);
      for (int i = 0; i < units; i++) once();
      mine.own = now(CLOCK_THREAD_CPUTIME_ID) - mine.own, mine.end = now(CLOCK_MONOTONIC);
      barrier.wait();
      if (thread == 0) {
        double begin = spans[0].begin, end = spans[0].end, rate = 0, fastest = 0;
        for (const Span& s : spans) {
          const double own = units * unit / std::max(s.own, 1e-9);
          begin = std::min(begin, s.begin), end = std::max(end, s.end);
          rate += own, fastest = std::max(fastest, own);
        }
        // What they share counts where they were on their cores at the same time, which others may prevent:
        // but all together are never slower than the fastest of them was.
        const double took = std::max(alone ? spans[0].own : end - begin, 1e-9);
        best = std::max(best, alone ? rate : std::max(fastest, units * unit * threads / took));
        units = std::clamp(int(units * 0.002 / took), 1, 1 << 20);  // rounds of 2 ms
        done = now(CLOCK_MONOTONIC) >= stop;
      }
      barrier.wait();
      if (done) return;
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; i++) helpers.emplace_back(work, i);
  work(0);
  for (std::thread& t : helpers) t.join();
  return best;
}

}  // namespace pt
