#include "comm.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>

#include "pool.h"

namespace pt {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kAlone = std::chrono::microseconds(50);  // then others get the core if they want it,
constexpr auto kLeastSpin = std::chrono::microseconds(10), kMostSpin = std::chrono::microseconds(400);
constexpr long kNap = 20'000'000;  // ns: between two looks whether all ranks live

// Not FUTEX_PRIVATE: the word is shared between processes.
long futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* until) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), what, value, until, nullptr, 0);
}

// Rounds are counted modulo 2^32, and no rank is two ahead of another.
bool reached(uint32_t now, uint32_t round) { return int32_t(now - round) >= 0; }

constexpr uint64_t kWhere = (1u << 28) - 1;  // of what a round is about: call, 4 bits of what, where

std::string words(uint64_t about) {
  static const char* const what[] = {"nothing", "a message", "a sum", "logits", "rows"};
  return "call " + std::to_string(about >> 32) + " (" + what[std::min<uint64_t>(about >> 28 & 15, 4)] + ")";
}

}  // namespace

Ranks::Ranks(int fd, int rank, int size, size_t place) : rank_(rank), size_(size), place_(place) {
  void* at = mmap(nullptr, bytes(size, place), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<uint8_t*>(at);
}

Ranks::~Ranks() {
  if (mapped_) munmap(memory_, bytes(size_, place_));
}

void Ranks::look() const {
  for (size_t i = 0; i < ended_.size(); i++) {
    pollfd one{ended_[i], POLLIN, 0};
    if (poll(&one, 1, 0) > 0)
      throw RankLost("rank " + std::to_string(rank_ ? 0 : i + 1) + " of " + std::to_string(size_) +
                     " has ended");
  }
}

void Ranks::await(int rank, uint32_t round, bool patient) {
  wait_for(rank, round, patient);
  const uint64_t theirs = mark(rank).about[round & 1].load(std::memory_order_relaxed),
                 mine = about_[round & 1];
  if (theirs != mine)
    throw RankLost("rank " + std::to_string(rank) + " of " + std::to_string(size_) + " is at " +
                   words(theirs) + " and rank " + std::to_string(rank_) + " at " + words(mine) +
                   ": they are out of step");
}

void Ranks::wait_for(int rank, uint32_t round, bool patient) {
  Mark& m = mark(rank);
  const auto start = Clock::now();
  for (auto now = start; now - start < spin_; now = Clock::now()) {
    for (int i = 0; i < 64; i++) {
      if (reached(m.round.load(std::memory_order_acquire), round)) {
        spin_ = std::min(spin_ + spin_ / 4, std::chrono::nanoseconds(kMostSpin));
        return;
      }
      relax();
    }
    if (now - start > kAlone) sched_yield();
  }
  const timespec nap{0, kNap};
  for (;;) {
    m.sleeping.fetch_add(1);
    const uint32_t seen = m.round.load();
    if (!reached(seen, round)) futex(m.round, FUTEX_WAIT, seen, &nap);
    m.sleeping.fetch_sub(1);
    const std::chrono::duration<double> waited = Clock::now() - start;
    if (reached(m.round.load(), round)) {
      // Where ranks have to share cores with others, whoever spins keeps away the one that it waits for.
      const std::chrono::nanoseconds least = kLeastSpin, most = kMostSpin;
      if (!patient) spin_ = waited < most ? std::min(2 * spin_, most) : std::max(spin_ / 2, least);
      return;
    }
    look();
    if (!patient && waited.count() > patience_)
      throw RankLost("rank " + std::to_string(rank) + " of " + std::to_string(size_) +
                     " has not answered for " + std::to_string(int(waited.count())) + " s");
  }
}

void Ranks::begin(What what, size_t at, bool patient) {
  for (int r = 0; r < size_; r++)
    if (r != rank_) await(r, round_, patient);
  round_++;
  about_[round_ & 1] = uint64_t(call_) << 32 | uint64_t(what) << 28 | (at & kWhere);
}

void Ranks::post() {
  Mark& m = mark(rank_);
  m.about[round_ & 1].store(about_[round_ & 1], std::memory_order_relaxed);
  m.round.store(round_);
  if (m.sleeping.load()) futex(m.round, FUTEX_WAKE, INT_MAX, nullptr);
}

void Ranks::sum(float* x, size_t count) {
  const size_t most = place_ / sizeof(float);
  for (size_t at = 0; at < count; at += most) {
    const size_t n = std::min(most, count - at);
    float* to = x + at;
    begin(What::Sum, count - at);
    std::memcpy(place(rank_), to, n * sizeof(float));
    post();
    for (int r = 0; r < size_; r++) {
      if (r != rank_) await(r, round_);
      const float* from = reinterpret_cast<const float*>(place(r));
      if (r == 0)
        std::memcpy(to, from, n * sizeof(float));
      else
        for (size_t i = 0; i < n; i++) to[i] += from[i];
    }
  }
}

void Ranks::pass(int from, int to, float* x, size_t count) {
  const size_t most = place_ / sizeof(float);
  for (size_t at = 0; at < count; at += most) {
    const size_t n = std::min(most, count - at);
    begin(What::Pass, count - at);
    if (rank_ == from) std::memcpy(place(from), x + at, n * sizeof(float));
    post();
    if (rank_ != to) continue;
    await(from, round_);
    std::memcpy(x + at, place(from), n * sizeof(float));
  }
}

// The first round begins with how many bytes there are.
void Ranks::send(const uint8_t* data, size_t bytes) {
  size_t head = sizeof(uint64_t), at = 0;
  call_++;
  do {
    const size_t n = std::min(place_ - head, bytes - at);
    begin(What::Message, at);
    if (head) {
      const uint64_t all = bytes;
      std::memcpy(place(0), &all, sizeof all);
    }
    if (n) std::memcpy(place(0) + head, data + at, n);
    post();
    at += n, head = 0;
  } while (at < bytes);
}

std::vector<uint8_t> Ranks::receive() {
  std::vector<uint8_t> data;
  size_t head = sizeof(uint64_t), at = 0;
  call_++;
  do {
    begin(What::Message, at, head > 0);
    post();
    await(0, round_, head > 0);
    if (head) {
      uint64_t all;
      std::memcpy(&all, place(0), sizeof all);
      data.resize(all);
    }
    const size_t n = std::min(place_ - head, data.size() - at);
    if (n) std::memcpy(data.data() + at, place(0) + head, n);
    at += n, head = 0;
  } while (at < data.size());
  return data;
}

void Ranks::gather(const float* mine, int rows, const int* starts, float* out) {
  int widest = 0;
  for (int r = 0; r < size_; r++) widest = std::max(widest, starts[r + 1] - starts[r]);
  // As many rows a round as there is room for; of a row that has none, a piece.
  const int most = int(place_ / sizeof(float)), piece = std::min(widest, most);
  const int together = piece ? std::min(most / piece, rows) : 0;
  for (int row = 0; row < rows && piece; row += together)
    for (int at = 0; at < widest; at += piece) {
      const int count = std::min(together, rows - row);
      const auto part = [&](int r) { return size_t(std::clamp(starts[r + 1] - starts[r] - at, 0, piece)); };
      const int width = starts[rank_ + 1] - starts[rank_];
      const float* from = mine + size_t(row) * width + at;
      float* to = out + size_t(row) * starts[size_] + at;
      begin(What::Gather, size_t(rows - row));
      float* shown = rank_ ? reinterpret_cast<float*>(place(rank_)) : to;
      const size_t apart = rank_ ? part(rank_) : size_t(starts[size_]);
      for (int i = 0; i < count && part(rank_); i++)
        std::copy_n(from + size_t(i) * width, part(rank_), shown + i * apart);
      post();
      for (int r = 1; r < size_ && !rank_; r++) {
        await(r, round_);
        const float* theirs = reinterpret_cast<const float*>(place(r));
        for (int i = 0; i < count; i++)
          std::copy_n(theirs + i * part(r), part(r), to + size_t(i) * starts[size_] + starts[r]);
      }
    }
}

}  // namespace pt
