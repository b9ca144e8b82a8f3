// All-gather between ranks: each rank writes its own part, then reads the parts of all.
//
// Ranks of one node use shared memory, with two buffers for each rank, used in turn: when a rank begins to write for all-gather
// n + 2, every peer has reached n + 1 and has finished reading n. Between nodes the engine calls a function of Python (gloo).
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "base/waiting.hpp"

namespace llama {

class AllGather {
  public:
    virtual ~AllGather() = default;
    // The buffer to which this rank writes its part of the next all-gather.
    virtual char* own_part() = 0;
    // Publishes `bytes` of own_part() and returns when all ranks have done so. part_of(rank) is valid until `gather` has
    // returned once more.
    virtual void gather(size_t bytes) = 0;
    virtual const char* part_of(int rank) = 0;
    // Whether an all-gather failed. Values computed since then are invalid.
    virtual bool failed() const { return false; }
    // Seconds between this rank's arrivals and the last rank's, summed over all all-gathers.
    double waited() const { return waited_; }

  protected:
    double waited_ = 0;
};

class SharedMemoryAllGather : public AllGather {
  public:
    // `memory`: size_for(ranks, bytes), zeroed before the first use, mapped by all ranks.
    SharedMemoryAllGather(char* memory, int rank, int ranks, size_t bytes)
        : memory_(memory), rank_(rank), ranks_(ranks), bytes_(align(bytes)) {}

    static size_t size_for(int ranks, size_t bytes) { return ranks * (kLine + 2 * align(bytes)); }

    char* own_part() override { return place(rank_, number_ + 1); }
    const char* part_of(int rank) override { return place(rank, number_); }

    void gather(size_t) override {
        number_++;
        const double arrival = seconds_now();
        arrival_time(rank_).store(arrival, std::memory_order_relaxed);
        arrived(rank_).store(number_, std::memory_order_seq_cst);
        futex_wake_if_waited(rank_);
        double last = arrival;
        for (int peer = 0; peer < ranks_; peer++) {
            await(peer);
            last = std::max(last, arrival_time(peer).load(std::memory_order_relaxed));
        }
        // Arrival times leave out the time that this rank spends without a core after the last arrival.
        waited_ += last - arrival;
    }

  private:
    static constexpr size_t kLine = 128;
    static size_t align(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
    std::atomic<uint32_t>& arrived(int rank) { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_ + rank * kLine); }
    // When a rank reached this all-gather, by the clock that all processes of a host share. Two values, used in turn.
    std::atomic<double>& arrival_time(int rank) {
        return *reinterpret_cast<std::atomic<double>*>(memory_ + rank * kLine + 8 + number_ % 2 * 8);
    }
    std::atomic<uint32_t>& waiters(int rank) { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_ + rank * kLine + 64); }
    char* place(int rank, uint32_t number) { return memory_ + ranks_ * kLine + (size_t(rank) * 2 + number % 2) * bytes_; }

    bool has_arrived(int peer) { return int32_t(arrived(peer).load(std::memory_order_acquire) - number_) >= 0; }

    void futex_wake_if_waited(int rank) {
        if (waiters(rank).load()) futex_wake(&arrived(rank), true);
    }

    // Spins, yields, then sleeps until the peer arrives, which may be microseconds late or may have no core.
    void await(int peer) {
        for (int turn = 0; turn < 2048; turn++) {
            if (has_arrived(peer)) return;
            turn % 16 == 15 ? core_.yield() : relax();
        }
        waiters(peer).fetch_add(1);
        while (!has_arrived(peer)) {
            uint32_t seen = arrived(peer).load();
            if (int32_t(seen - number_) >= 0) break;
            timespec limit{0, 10'000'000};
            futex_wait(&arrived(peer), seen, &limit, true);
        }
        waiters(peer).fetch_sub(1);
    }

    CoreSharing core_;
    char* memory_;
    int rank_, ranks_;
    size_t bytes_;
    uint32_t number_ = 0;
};

// `gather(send, receive, bytes)` gathers every rank's `send` into `receive` [ranks][bytes]. It returns 0 unless it failed.
using GatherFunction = int (*)(const char* send, char* receive, size_t bytes);

class FallbackAllGather : public AllGather {
  public:
    FallbackAllGather(GatherFunction gather, int ranks, size_t bytes)
        : gather_(gather), send_(new char[bytes]), receive_(new char[bytes * ranks]) {}
    char* own_part() override { return send_.get(); }
    void gather(size_t bytes) override {
        bytes_ = bytes;
        const double arrival = seconds_now();
        failed_ = failed_ || gather_(send_.get(), receive_.get(), bytes) != 0;  // no call follows a failed one
        waited_ += seconds_now() - arrival;
    }
    const char* part_of(int rank) override { return receive_.get() + rank * bytes_; }
    bool failed() const override { return failed_; }

  private:
    GatherFunction gather_;
    bool failed_ = false;
    std::unique_ptr<char[]> send_, receive_;
    size_t bytes_ = 0;
};

}  // namespace llama
