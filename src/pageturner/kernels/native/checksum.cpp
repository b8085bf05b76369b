#include "checksum.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <thread>
#include <vector>

namespace pt {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

template <class T>
uint64_t read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

uint64_t mixed(uint64_t lane, uint64_t input) { return std::rotl(lane + input * kPrime2, 31) * kPrime1; }

uint64_t merged(uint64_t hash, uint64_t lane) { return (hash ^ mixed(0, lane)) * kPrime1 + kPrime4; }

}  // namespace

uint64_t xxh64(const uint8_t* data, size_t bytes, uint64_t seed) {
  uint64_t hash = seed + kPrime5;
  size_t left = bytes;
  if (left >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; left >= 32; left -= 32, data += 32)
      for (int i = 0; i < 4; i++) lanes[i] = mixed(lanes[i], read<uint64_t>(data + 8 * i));
    hash =
        std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (uint64_t lane : lanes) hash = merged(hash, lane);
  }
  hash += bytes;
  for (; left >= 8; left -= 8, data += 8)
    hash = std::rotl(hash ^ mixed(0, read<uint64_t>(data)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    hash = std::rotl(hash ^ (read<uint32_t>(data) * kPrime1), 23) * kPrime2 + kPrime3;
    left -= 4, data += 4;
  }
  for (; left > 0; left--, data++) hash = std::rotl(hash ^ (*data * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

void block_sums(const KVView& kv, const int32_t* blocks, const uint64_t* seeds, size_t count, int threads,
                uint64_t* sums) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < count;)
      sums[i] = xxh64(kv.block(0, blocks[i]), kv.block_bytes() * kv.layers, seeds[i]);
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min(size_t(std::max(threads, 1)), count); i++) helpers.emplace_back(work);
  work();
  for (std::thread& t : helpers) t.join();
}

}  // namespace pt
