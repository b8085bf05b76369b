// Storage in a memory file and checksums of its blocks: published values of XXH64, every length up to two of
// its strides at odd addresses, several threads.
#include <sys/mman.h>
#include <unistd.h>

#include "../../src/pageturner/kernels/native/checksum.h"
#include "checks.h"

namespace check {
namespace {

void published(Report& report) {
  const uint64_t prime = 2654435761;  // seed of the published values, and of the bytes that they are of
  std::vector<uint8_t> data;
  for (uint32_t byte = uint32_t(prime); data.size() < 101; byte *= byte) data.push_back(uint8_t(byte >> 24));
  const struct {
    size_t length;
    uint64_t plain, seeded;
  } values[] = {{0, 0xEF46DB3751D8E999, 0xAC75FDA2929B17EF},
                {1, 0x4FCE394CC88952D8, 0x739840CB819FA723},
                {14, 0xCFFA8DB881BC3A3D, 0x5B9611585EFCC9CB},
                {101, 0x0EAB543384F878AD, 0xCAA65939306F1E21}};
  bool good = true;
  for (const auto& v : values)
    good = good && pt::xxh64(data.data(), v.length, 0) == v.plain &&
           pt::xxh64(data.data(), v.length, prime) == v.seeded;
  report.equal("xxh64: published values", good);
}

}  // namespace

void storage(Report& report) {
  published(report);
  const size_t part = 4 << 20, bytes = part - 4096;
  const int fd = memfd_create("kernels_test", 0);
  if (fd < 0 || ftruncate(fd, off_t(2 * part))) return report.equal("a memory file", false);
  bool same_sums = true;
  {
    pt::Buffer buffer(fd, part, bytes);
    for (size_t i = 0; i < bytes; i++) buffer.data()[i] = uint8_t(i * i >> 3);
    buffer.take_huge_pages(bytes);
    const pt::KVView kv{buffer.data() + 1, 2, 5, 3, 1, 8, pt::KVType::F16};
    const int32_t blocks[] = {4, 0, 2};
    const uint64_t seeds[] = {1, 2, 3};
    for (int threads = 1; threads < 5; threads++) {
      uint64_t sums[3];
      pt::block_sums(kv, blocks, seeds, 3, threads, sums);
      for (int i = 0; i < 3; i++)
        same_sums = same_sums && sums[i] == pt::xxh64(kv.block(0, blocks[i]), 2 * kv.block_bytes(), seeds[i]);
    }
    std::vector<uint64_t> found;
    for (size_t n = 0; n <= 64; n++) found.push_back(pt::xxh64(buffer.data() + 3, n, 7));
    std::sort(found.begin(), found.end());
    same_sums = same_sums && std::adjacent_find(found.begin(), found.end()) == found.end();
  }
  report.equal("block_sums: by any number of threads", same_sums);
  pt::Buffer again(fd, part, bytes), moved = std::move(again);
  bool kept = true;
  for (size_t i = 0; i < bytes; i++) kept = kept && moved.data()[i] == uint8_t(i * i >> 3);
  report.equal("a memory file keeps what was written", kept);
  bool refused = false;
  try {
    pt::Buffer beyond(fd, 2 * part, bytes);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  report.equal("a part that is not there is refused", refused);
  close(fd);
}

}  // namespace check
