// Processes of one machine that compute one model together (ranks), over memory that they share.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace pt {

// A rank ended, did not come for longer than it may, or came to another round than this one.
struct RankLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Every call is made by all ranks in the same order. A call goes in rounds; in each a rank may write into a
// place of its own, says that it has, and reads those of others. Places are two, used in turns: whoever has
// come to round t has read everything of round t - 2, so no round needs a second barrier.
class Ranks {
 public:
  // fd: memory that all ranks map, of at least bytes(size, place), zeros at first.
  Ranks(int fd, int rank, int size, size_t place);
  // In one process: memory that outlives them, aligned to 128 bytes.
  Ranks(uint8_t* memory, int rank, int size, size_t place)
      : rank_(rank), size_(size), place_(place), memory_(memory), mapped_(false) {}
  ~Ranks();
  Ranks(const Ranks&) = delete;
  static size_t bytes(int size, size_t place) { return size_t(size) * (kLine + 2 * place); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Of the last call that rank 0 told, or that was received; calls are counted from 1.
  uint32_t call() const { return call_; }
  // Files that become readable when a process ends, and seconds that a rank may keep others waiting.
  void watch(std::vector<int> ended, double patience) { ended_ = std::move(ended), patience_ = patience; }

  // x becomes ((rank 0's + rank 1's) + rank 2's) + ..., the same bits at all ranks.
  void sum(float* x, size_t count);
  // What rank `from` has in x comes to x of rank `to`. The others take part, and keep theirs.
  void pass(int from, int to, float* x, size_t count);
  // From rank 0 to all others. `receive` waits for as long as it takes unless a process ends.
  void send(const uint8_t* data, size_t bytes);
  std::vector<uint8_t> receive();
  // Rank 0 gets the columns of all ranks side by side: rank r's go to starts[r] .. starts[r + 1] - 1 of the
  // rows of `out`, which the others need not have.
  void gather(const float* mine, int rows, const int* starts, float* out);

 private:
  static constexpr size_t kLine = 128;  // bytes between what different ranks write
  enum class What : uint64_t { Message = 1, Sum, Gather, Pass };
  struct Mark {                      // of a rank
    std::atomic<uint32_t> round;     // that it has written, and come to
    std::atomic<uint32_t> sleeping;  // how many wait for its next
    // What the last two rounds are about, by turn: the call, What, and where in it. Whoever reads another's
    // place has looked that both mean the same.
    std::atomic<uint64_t> about[2];
  };
  Mark& mark(int rank) const { return *reinterpret_cast<Mark*>(memory_ + size_t(rank) * kLine); }
  uint8_t* place(int rank) const {
    return memory_ + size_t(size_) * kLine + (2 * size_t(rank) + (round_ & 1)) * place_;
  }
  void begin(What, size_t at, bool patient = false);  // a round: afterwards its place may be written
  void post();                                        // it is written
  void await(int rank, uint32_t round, bool patient = false);
  void wait_for(int rank, uint32_t round, bool patient);
  void look() const;  // throws where a process has ended

  const int rank_, size_;
  const size_t place_;
  uint8_t* memory_;
  const bool mapped_ = true;
  uint32_t round_ = 0, call_ = 0;
  uint64_t about_[2] = {0, 0};  // this rank's own, as in Mark
  std::vector<int> ended_;
  double patience_ = 30;
  std::chrono::nanoseconds spin_{std::chrono::microseconds(100)};  // for so long it waits before it sleeps
};

}  // namespace pt
