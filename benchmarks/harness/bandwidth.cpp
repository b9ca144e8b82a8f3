// How fast the memory can be read: threads sum a buffer that no cache holds, and every pass is timed.
//
// Read-only, as decoding reads the weights. Each thread has its own share of the buffer and its own core.
// Built by bandwidth.py: g++ -O3 -march=native -std=c++20 -shared -fPIC -pthread

#include <sched.h>
#include <sys/mman.h>

#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

using Line = std::uint64_t __attribute__((vector_size(64)));  // a cache line; split in two where registers are shorter
constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Reads the share as `kStreams` interleaved runs, which keeps more DRAM pages open and more prefetchers busy than one run;
// with kAhead > 0 it prefetches so many lines ahead. The fastest values depend on the core.
template <int kStreams, int kAhead>
std::uint64_t sum(const Line* lines, std::size_t count) {
    const std::size_t run = count / kStreams;
    Line totals[kStreams][2] = {};  // two chains of additions for each run
    for (std::size_t i = 0; i + 1 < run; i += 2) {
        for (int s = 0; s < kStreams; ++s) {
            const Line* here = lines + s * run + i;
            if constexpr (kAhead > 0) {
                __builtin_prefetch(here + kAhead);
                __builtin_prefetch(here + kAhead + 1);
            }
            totals[s][0] += here[0];
            totals[s][1] += here[1];
        }
    }
    std::uint64_t total = 0;
    for (auto& pair : totals)
        for (auto& chain : pair)
            for (int lane = 0; lane < 8; ++lane) total += chain[lane];
    return total;
}

using Sum = std::uint64_t (*)(const Line*, std::size_t);
constexpr Sum kPatterns[] = {sum<1, 0>, sum<4, 0>, sum<4, 16>, sum<8, 0>, sum<8, 16>};

void sit_on(int core) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    sched_setaffinity(0, sizeof only, &only);  // of this thread; not fatal where it is not allowed
}

}  // namespace

extern "C" {

int num_patterns() { return sizeof kPatterns / sizeof *kPatterns; }

// `bytes` of written memory (untouched pages all map to one page of zeros); null if the allocation fails.
void* make_buffer(std::size_t bytes) {
    void* memory = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes + kHugePage, MADV_HUGEPAGE);
    auto* words = static_cast<std::uint64_t*>(memory);
    for (std::size_t i = 0; i < bytes / sizeof *words; ++i) words[i] = i * 0x9E3779B97F4A7C15u;
    return memory;
}

void free_buffer(void* memory, std::size_t bytes) { munmap(memory, bytes + kHugePage); }

// Read the buffer `passes` times by `threads` threads on `cores`; seconds[i] is the time of pass i, until the last
// thread has ended. Returns the sum, so that no compiler can remove the reads.
std::uint64_t read_passes(const void* memory, std::size_t bytes, int threads, const int* cores, int pattern, int passes,
                          double* seconds) {
    using Clock = std::chrono::steady_clock;
    const auto* aligned = reinterpret_cast<const Line*>((reinterpret_cast<std::uintptr_t>(memory) + 63) & ~std::uintptr_t{63});
    const std::size_t share = bytes / sizeof(Line) / threads;
    std::vector<std::uint64_t> totals(threads);
    int next = -1;  // the first arrival of all threads begins the first pass
    Clock::time_point last;
    auto stamp = [&]() noexcept {
        const auto now = Clock::now();
        if (next >= 0) seconds[next] = std::chrono::duration<double>(now - last).count();
        last = now;
        ++next;
    };
    std::barrier together(threads, stamp);
    std::vector<std::thread> readers;
    for (int t = 0; t < threads; ++t)
        readers.emplace_back([&, t] {
            sit_on(cores[t]);
            together.arrive_and_wait();
            for (int pass = 0; pass < passes; ++pass) {
                totals[t] += kPatterns[pattern](aligned + t * share, share);
                together.arrive_and_wait();
            }
        });
    for (auto& reader : readers) reader.join();
    std::uint64_t total = 0;
    for (auto value : totals) total += value;
    return total;
}
}
