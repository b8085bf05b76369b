// Ranks as threads over one memory, so that a sanitizer of threads sees all that they do with it: sums,
// messages and logits of random sizes in random order, on more threads than cores, and ranks that are out of
// step. Prints a line for each check; the exit status is 1 if one failed.
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../src/pageturner/kernels/native/comm.h"

namespace {

constexpr size_t kPlace = 4096;

struct Together {
  explicit Together(int size) : memory(pt::Ranks::bytes(size, kPlace) / sizeof(uint64_t) + 16) {
    auto* at = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 127) / 128 * 128);
    for (int r = 0; r < size; r++) ranks.push_back(std::make_unique<pt::Ranks>(at, r, size, kPlace));
  }
  // work(rank) by all of them at once.
  template <class F>
  void run(const F& work) {
    std::vector<std::thread> threads;
    for (auto& one : ranks) threads.emplace_back([&work, &one] { work(*one); });
    for (auto& thread : threads) thread.join();
  }
  std::vector<uint64_t> memory;
  std::vector<std::unique_ptr<pt::Ranks>> ranks;
};

float value(int rank, int round, size_t i) { return float((rank * 31 + round * 7 + int(i % 97)) % 1000) / 8; }

// Whether this rank got what it should in so many rounds.
bool rounds(pt::Ranks& ranks, int count, unsigned seed) {
  std::mt19937 random(seed);  // the same at all ranks
  bool good = true;
  for (int round = 0; round < count; round++) {
    const int what = int(random() % 4), size = ranks.size();
    const size_t n = 1 + random() % (random() % 4 ? 300 : 5000);
    if (what == 0) {
      std::vector<float> x(n);
      for (size_t i = 0; i < n; i++) x[i] = value(ranks.rank(), round, i);
      ranks.sum(x.data(), n);
      for (size_t i = 0; i < n; i++) {
        float expected = value(0, round, i);
        for (int r = 1; r < size; r++) expected += value(r, round, i);
        good &= x[i] == expected;
      }
    } else if (what == 1) {
      std::vector<uint8_t> data(n);
      for (size_t i = 0; i < n; i++) data[i] = uint8_t(i * 13 + size_t(round));
      if (ranks.rank() == 0)
        ranks.send(data.data(), n);
      else
        good &= ranks.receive() == data;
    } else if (what == 3) {
      const int from = int(random() % unsigned(size)), to = int(random() % unsigned(size));
      if (from == to) continue;
      std::vector<float> x(n);
      for (size_t i = 0; i < n; i++) x[i] = value(ranks.rank(), round, i);
      ranks.pass(from, to, x.data(), n);
      const int whose = ranks.rank() == to ? from : ranks.rank();
      for (size_t i = 0; i < n; i++) good &= x[i] == value(whose, round, i);
    } else {
      const int rows = 1 + int(random() % 9);
      std::vector<int> starts{0};
      for (int r = 0; r < size; r++) starts.push_back(starts.back() + int(random() % (n + 1)));
      const int all = starts.back(), first = starts[size_t(ranks.rank())];
      const int width = starts[size_t(ranks.rank()) + 1] - first;
      std::vector<float> mine, out(size_t(rows) * size_t(all));
      for (int row = 0; row < rows; row++)
        for (int c = 0; c < width; c++) mine.push_back(value(row, round, size_t(first + c)));
      ranks.gather(mine.data(), rows, starts.data(), ranks.rank() ? nullptr : out.data());
      for (size_t i = 0; !ranks.rank() && i < out.size(); i++)
        good &= out[i] == value(int(i / size_t(all)), round, i % size_t(all));
    }
  }
  return good;
}

bool random_rounds(int size) {
  Together all(size);
  std::vector<char> good(size_t(size), 0);
  all.run([&](pt::Ranks& one) { good[size_t(one.rank())] = rounds(one, 300, unsigned(size)); });
  for (char one : good)
    if (!one) return false;
  return true;
}

// Rank 0 tells of calls that it does not make: every other rank must raise, with its sum untouched.
bool out_of_step(int size) {
  Together all(size);
  std::vector<char> good(size_t(size), 0);
  all.run([&](pt::Ranks& one) {
    one.watch({}, 20);
    std::vector<float> x(8, 1.0f);
    try {
      const uint8_t data[32] = {};
      if (one.rank()) one.receive(), one.sum(x.data(), x.size());
      for (int i = 0; one.rank() == 0 && i < 4; i++) one.send(data, sizeof data);
    } catch (const pt::RankLost& lost) {
      const bool said = std::string(lost.what()).find("out of step") != std::string::npos;
      good[size_t(one.rank())] = said && x == std::vector<float>(8, 1.0f);
    }
  });
  for (char one : good)
    if (!one) return false;
  return true;
}

}  // namespace

int main() {
  int failed = 0;
  const auto report = [&](const char* what, int size, bool good) {
    std::printf("%s of %d ranks %s\n", what, size, good ? "ok" : "FAILED");
    failed += !good;
  };
  for (int size : {1, 2, 3, 5}) report("random rounds", size, random_rounds(size));
  report("out of step", 2, out_of_step(2));
  return failed > 0;
}
