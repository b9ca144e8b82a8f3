// Packs rows of weights as blocks (block_codings.hpp).
#pragma once

#include <algorithm>
#include <cmath>

#include "block_codings.hpp"

namespace llama {

// One output's block on its way to memory: weight i is scale * number(code) + minimum of its group.
template <class C>
struct Block {
    static constexpr bool kIsShort = BlockLayout<C>::kIsShort;
    static constexpr int kMost = 127, kMostFactor = kIsShort ? C::kZeros ? 63 : 127 : INT16_MAX;
    static constexpr int kZeroUnits = !kIsShort ? 256 : C::kBits == 4 ? 32 : 16;  // of a stored zero
    // Of a stored unit, which is one where groups have zeros: their factors are as exact as the file's.
    static constexpr int kUnits = C::kZeros ? 1 : 128, kMostUnit = C::kZeros ? 255 : INT16_MAX;
    static constexpr double kLargestZero = kIsShort ? 1023.0 / kZeroUnits : 128 - (1 << C::kBits);

    int inputs = 0;
    int codes[kBlockInputs] = {};
    double scales[kBlockInputs / C::kGroup] = {}, minima[kBlockInputs / C::kGroup] = {};

    // What is stored.
    double step = 0;
    int unit = 1, factors[kBlockInputs / C::kGroup] = {}, zeros[kBlockInputs / C::kGroup] = {};

    static int number(int code) {
        if constexpr (C::kTable != nullptr) return C::kTable[code];
        return code;
    }
    int groups() const { return (inputs + C::kGroup - 1) / C::kGroup; }
    double value(int i) const { return scales[i / C::kGroup] * number(codes[i]) + minima[i / C::kGroup]; }
    // As kernels compute it.
    int64_t factor_of(int g) const {
        return !kIsShort ? factors[g] : C::kZeros ? factors[g] * unit : (factors[g] * unit + 64) >> 7;
    }
    // The whole number that kernels read.
    int weight(int i) const {
        const int g = i / C::kGroup, zero = C::kZeros ? zeros[g] * (256 / kZeroUnits) : C::kMiddle * 256;
        return int(((int64_t(number(codes[i])) * 256 - zero) * factor_of(g) + (1 << 14)) >> 15);
    }

    // Chooses the step and the groups' factors and zeros.
    void choose() {
        double largest = 0;
        for (int g = 0; g < groups(); g++)
            if (!holds(g)) recode(g);
        for (int i = 0; i < inputs; i++) largest = std::max(largest, std::fabs(value(i)));
        if (!(largest > 0)) return;
        if (kIsShort) choose_base();
        // Rounded factors may make a weight a little larger. With exactly kMost, many weights lie between two whole numbers.
        for (double limit = kMost - 0.03; limit > kMost / 2; limit -= 0.5) {
            if (kIsShort) unit = std::clamp(int(limit * 128 * kUnits * std::fabs(base) / largest), 1, kMostUnit);
            step = kIsShort ? base * 128 * kUnits / unit : largest / limit;
            bool fits = true;
            for (int g = 0; g < groups(); g++) {
                const double factor = std::nearbyint(kIsShort ? scales[g] / base : scales[g] * 128 / step);
                factors[g] = int(std::clamp(factor, -double(kMostFactor + 1), double(kMostFactor)));
                if (C::kZeros && scales[g] != 0) zeros[g] = int(std::nearbyint(-minima[g] / scales[g] * kZeroUnits));
            }
            for (int i = 0; i < inputs; i++) fits = fits && std::abs(weight(i)) <= kMost;
            if (fits) return;
        }
    }

  private:
    double base = 0;  // kShort: scales are whole numbers of it, in k-quants exactly

    bool holds(int g) const {
        if (!C::kZeros) return true;
        const double least = kIsShort ? 0 : -kLargestZero, zero = -minima[g] / scales[g];
        return (scales[g] > 0 || (scales[g] < 0 && !kIsShort)) && zero >= least && zero <= kLargestZero;
    }

    // Other codes for a group whose weights lie far from zero beside their scale.
    void recode(int g) {
        const int begin = g * C::kGroup, end = std::min(inputs, begin + C::kGroup), most_code = (1 << C::kBits) - 1;
        double values[C::kGroup], least = 0, most = 0;
        for (int i = begin; i < end; i++) {
            values[i - begin] = value(i);
            least = std::min(least, values[i - begin]), most = std::max(most, values[i - begin]);
        }
        scales[g] = (most - least) / most_code;
        minima[g] = least;
        for (int i = begin; i < end; i++)
            codes[i] =
                scales[g] > 0 ? std::clamp(int(std::nearbyint((values[i - begin] - least) / scales[g])), 0, most_code) : 0;
    }

    void choose_base() {
        double most = 0, best = INFINITY;
        for (int g = 0; g < groups(); g++)
            if (std::fabs(scales[g]) > std::fabs(most)) most = scales[g];
        if (!C::kZeros) most = -most;  // llama.cpp makes the largest one -128
        double shares[kBlockInputs / C::kGroup];
        for (int g = 0; g < groups(); g++) shares[g] = scales[g] / most;
        for (int whole = 1; whole <= kMostFactor + !C::kZeros && best > 1e-3; whole++) {
            double error = 0;
            for (int g = 0; g < groups() && error < best; g++) {
                const double factor = shares[g] * whole;
                error = std::max(error, std::fabs(factor - std::nearbyint(factor)) + (factor > kMostFactor + 0.5));
            }
            if (error < best) best = error, base = most / whole;
        }
    }
};

template <class C>
struct BlockPacking : C {
    using Layout = BlockLayout<C>;
    // Whether values become codes here: other codings come from files.
    static constexpr bool kEncodes = requires(float* x, int* codes, double d) { C::encode(x, 1, codes, d, d); };

    template <class S>
    static void pack(const PackedWeights& w, const S* source, int output) {
        double most = 0;
        for (int k = 0; k < w.inputs(); k++) most = std::max(most, std::fabs(double(widen(source[k]))));
        each_block(w, output, [&](int from, int count, char* block) {
            if constexpr (C::kBits == 8) {
                double values[kBlockInputs];
                for (int i = 0; i < count; i++) values[i] = widen(source[from + i]);
                put_bytes(block, output, values, count, C::kOneStep ? most : 0);
            } else if constexpr (kEncodes) {
                Block<C> found;
                found.inputs = count;
                for (int g = 0; g < found.groups(); g++) {
                    float values[C::kGroup];
                    const int begin = g * C::kGroup, size = std::min(C::kGroup, count - begin);
                    for (int i = 0; i < size; i++) values[i] = widen(source[from + begin + i]);
                    C::encode(values, size, found.codes + begin, found.scales[g], found.minima[g]);
                }
                put(block, output, found);
            }
        });
    }

    static void pack_groups(const PackedWeights& w, const GroupedRow& source, int output) {
        each_block(w, output, [&](int from, int count, char* block) {
            const uint8_t* codes = source.codes + from;
            const float* scales = source.scales + from / C::kGroup;
            const float* minima = source.minima ? source.minima + from / C::kGroup : nullptr;
            if constexpr (C::kBits == 8) {
                double values[kBlockInputs];
                for (int i = 0; i < count; i++) values[i] = double(scales[i / C::kGroup]) * int8_t(codes[i]);
                put_bytes(block, output, values, count, 0);
            } else {
                Block<C> found;
                found.inputs = count;
                for (int i = 0; i < count; i++) found.codes[i] = codes[i] & ((1 << C::kBits) - 1);
                for (int g = 0; g < found.groups(); g++) {
                    found.scales[g] = scales[g];
                    found.minima[g] = C::kZeros ? minima[g] : -C::kMiddle * scales[g];
                }
                put(block, output, found);
            }
        });
    }

  private:
    template <class F>
    static void each_block(const PackedWeights& w, int output, F&& f) {
        char* tile = w.output_tile(output / kTileOutputs);
        for (int from = 0; from < w.inputs(); from += kBlockInputs, tile += Layout::kBlockBytes)
            f(from, std::min(int(kBlockInputs), w.inputs() - from), tile);
    }

    // most: of the whole output where it has one step, else 0.
    static void put_bytes(char* block, int output, const double* values, int count, double most) {
        const int place = output % kTileOutputs, lane = place % 16;
        double largest = most;
        if (!most)
            for (int i = 0; i < count; i++) largest = std::max(largest, std::fabs(values[i]));
        const float step = float(largest / 127);
        reinterpret_cast<float*>(block)[place] = step;
        for (int k = 0; k < count && step > 0; k++) {
            char* half = block + Layout::half(k / kStepInputs, place / 16);
            const int at = k % kStepInputs;
            half[at / 4 * 64 + lane * 4 + at % 4] = char(std::clamp(std::nearbyint(values[k] / step), -127.0, 127.0));
        }
    }

    static void put(char* block, int output, Block<C>& from) {
        const int place = output % kTileOutputs;
        from.choose();
        reinterpret_cast<float*>(block)[place] = float(from.step);
        if (Layout::kIsShort) reinterpret_cast<int16_t*>(block + Layout::kUnits)[place] = int16_t(from.unit);
        for (int g = 0; g < from.groups(); g++) {
            char* group = block + Layout::group(g);
            if (Layout::kBytesAlone) {
                constexpr int kCount = kStepInputs / C::kGroup;
                group -= g % kCount * Layout::kGroupBytes;
                group[place * kCount + g % kCount] = char(from.factors[g]);
            } else if (Layout::kIsShort) {
                reinterpret_cast<uint16_t*>(group)[place] = uint16_t(from.zeros[g] << 6 | from.factors[g]);
            } else {
                reinterpret_cast<int16_t*>(group)[place] = int16_t(from.factors[g]);
                if (C::kZeros) reinterpret_cast<int16_t*>(group)[kTileOutputs + place] = int16_t(from.zeros[g]);
            }
        }
        for (int k = 0; k < from.inputs; k++)
            put_code(block + Layout::half(k / kStepInputs, place / 16), place % 16, k % kStepInputs, from.codes[k]);
    }

    static void put_code(char* half, int lane, int k, int code) {
        const int line = k / 8, upper = code >> 4, byte = lane * 4 + k % 4;
        half[line * 64 + byte] |= char((code & 15) << (k % 8 / 4 * 4));
        if constexpr (C::kBits > 4) {
            constexpr int kUpper = C::kBits - 4, kLines = Layout::kCombos / 4;
            const int pair = k % 8 / 4 * 2 + k % 2, bit = (line % kLines * 4 + pair) * kUpper;
            char* plane = half + Layout::kPlanes + line / kLines * 64;
            reinterpret_cast<uint16_t*>(plane)[lane * 2 + k % 4 / 2] |= uint16_t(upper << bit);
        }
    }
};

}  // namespace llama
