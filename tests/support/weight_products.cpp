// Prints products of every weight format by the kernels of this build, for a test that compares builds.
//
// A line for each format, type of activations, number of inputs and number of rows: a hash of the bits of all results, whether rows
// have the bits that they have alone, and the largest error beside the exact product of the packed weights (in float64), in units of
// the sum of the magnitudes of its terms.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <string>

#include "layers/epilogues.hpp"
#include "layers/experts.hpp"
#include "layers/projection.hpp"
#include "layers/rms_norm.hpp"
#include "weight_formats.hpp"

using namespace llama;

namespace {

#if defined(ONLY_BFLOAT16)  // those that share no path of a kernel: the others take as long again to compile
using Formats =
    FormatList<BFloat16Weights, Blocks<Int8Coding>, Blocks<Int8BlocksCoding>, Blocks<BlockInt4<Int4Coding>>,
               Blocks<Int4ZeroBy128Coding>, Blocks<Q4KCoding>, Blocks<Q5KCoding>, Blocks<Q6KCoding>, Blocks<Iq4XsCoding>>;
#else
using Formats = WeightFormats;
#endif

constexpr int kOutputs = 520;  // on one thread, tasks of four output tiles: K slices on tile registers

uint32_t state = 1;
float next() {
    state = state * 1664525 + 1013904223;
    return float(int32_t(state >> 8) - (1 << 23)) / float(1 << 23);
}

// How a format's codes become weights: a code is a number of `bits`, whose value is code - middle, or the table's number.
struct Stored {
    const char* name;
    int bits, group, middle;
    bool minima, is_short;  // is_short: scales are whole numbers of one that 256 inputs share
    const int8_t* table;
};
const Stored kAll[] = {{"int8_groups", 8, 32, 0, false, false, nullptr},
                       {"int4", 4, 32, 8, false, false, nullptr},
                       {"int4_min", 4, 32, 0, true, false, nullptr},
                       {"int4_128", 4, 128, 8, false, false, nullptr},
                       {"int4_zero_128", 4, 128, 0, true, false, nullptr},
                       {"q4_k", 4, 32, 0, true, true, nullptr},
                       {"q5_k", 5, 32, 0, true, true, nullptr},
                       {"q6_k", 6, 16, 32, false, true, nullptr},
                       {"q5_0", 5, 32, 16, false, false, nullptr},
                       {"q5_1", 5, 32, 0, true, false, nullptr},
                       {"iq4_nl", 4, 32, 0, false, false, kIq4Numbers},
                       {"iq4_xs", 4, 32, 0, false, true, kIq4Numbers},
                       {"mxfp4", 4, 32, 0, false, false, kFp4Numbers}};

// Weights as groups with every code, -128 too, or as values whose quantized form is not known here.
template <class T>
void products(const char* name, int inputs, int rows) {
    const WeightFormat<T>& format = *Formats::find<T>(name);
    state = 7;
    Linear<T> w(format, kOutputs, inputs);
    const Stored* stored = std::find_if(std::begin(kAll), std::end(kAll), [&](auto& s) { return std::string(s.name) == name; });
    const bool grouped = stored != std::end(kAll) && (inputs % kGroupInputs == 0 || stored - kAll > 2);
    std::vector<float> weights(size_t(kOutputs) * inputs);
    for (int o = 0; o < kOutputs; o++) {
        float* row = &weights[size_t(o) * inputs];
        std::vector<uint8_t> codes(inputs);
        std::vector<float> scales, minima;
        float unit = 0, unit_of_minima = 0;
        for (int k = 0; k < inputs; k++) {
            const Stored& as = grouped ? *stored : kAll[0];
            if (k % 256 == 0) unit = widen(to_half(next() / 4096)), unit_of_minima = widen(to_half(next() / 256));
            if (k % as.group == 0) {
                const int whole = as.minima ? int(next() * 63) : k ? int(next() * 128) : -128;
                scales.push_back(as.is_short ? as.minima ? std::fabs(unit * whole) : unit * whole
                                             : widen(to_half(next() / 64)));
                minima.push_back(as.is_short ? -std::fabs(unit_of_minima * whole) : widen(to_half(next())));
            }
            // Some outputs and inputs have the extreme codes throughout.
            const bool bytes = as.bits == 8;
            codes[k] = o % 7 == 3   ? (bytes ? 0x80 : 0)
                       : o % 7 == 4 ? (bytes ? 0x7f : (1 << as.bits) - 1)
                                    : uint8_t(int(next() * 127)) & ((1 << as.bits) - 1);
            const int code = as.table ? as.table[codes[k]] : bytes ? int8_t(codes[k]) : codes[k] - as.middle;
            row[k] = float(code) * scales.back() + (as.minima ? minima.back() : 0.0f);
        }
        if (grouped)
            w.pack(GroupedRow{codes.data(), scales.data(), minima.data()}, o);
        else
            w.pack(row, o);
    }
    Inputs<T> x(rows, inputs);
    x.reserve(format.input_form, rows, inputs);
    for (int r = 0; r < rows; r++) {
        for (int k = 0; k < inputs; k++) x[r][k] = narrow_to<T>((r % 5 == 1 ? 3.0f : r % 5 == 2 ? -3.0f : next()));
        x.quantize(format.input_form, r, int(round_up(inputs, 16)), rows);
    }
    Activations<float> y(rows, kOutputs), alone(1, kOutputs);
    auto run = [&](int count, int first, const Rows<float>& to) {
        Projection<T> projection(count > 64 ? 1 : 3);  // this thread runs the tasks of all
        projection.reserve(count);
        Inputs<T> part(count, inputs);
        part.reserve(format.input_form, count, inputs);
        for (int r = 0; r < count; r++) {
            std::memcpy(static_cast<void*>(part[r]), x[first + r], inputs * sizeof(T));
            part.quantize(format.input_form, r, int(round_up(inputs, 16)), count);
        }
        for (int task = 0; task < projection.tasks_of({w, part, count}); task++)
            projection.run({w, part, count}, task, 0, StoreTo<float>{to});
    };
    run(rows, 0, y);
    uint64_t hash = 1469598103934665603u;
    bool same = true;
    double error = 0;
    for (int r = 0; r < rows; r++) {
        if (r % 6 < 2) {
            run(1, r, alone);
            same = same && !std::memcmp(y[r], alone[0], kOutputs * 4);
        }
        for (int o = 0; o < kOutputs; o++) {
            uint32_t bits;
            std::memcpy(&bits, y[r] + o, 4);
            hash = (hash ^ bits) * 1099511628211u;
            double exact = 0, magnitude = 0;
            for (int k = 0; k < inputs; k++) {
                const double value = double(weights[size_t(o) * inputs + k]) * widen(x[r][k]);
                exact += value, magnitude += std::fabs(value);
            }
            if (magnitude > 0) error = std::max(error, std::fabs(y[r][o] - exact) / magnitude);
        }
    }
    std::printf("%s %s %d %d %016" PRIx64 " %d %g\n", name, sizeof(T) == 2 ? "bfloat16" : "float32", inputs, rows, hash, same,
                error);
}

// The experts that tokens choose. Rows 3 and 5 of the router are equal, and row 7 is row 4 but for the last bit of a weight.
void experts() {
    constexpr int kTokens = 10000, kDim = 88, kExperts = 37, kChosen = 4, kStride = 96;
    Shape shape{};
    shape.max_tokens = kTokens;
    Operation route{};
    route.kind = kRoute, route.experts = kExperts, route.chosen = kChosen;
    Experts<bf16> experts(shape, {route});
    const Experts<bf16>& chosen = experts;
    Activations<bf16> x(kTokens, kDim);
    std::vector<bf16> router(kExperts * kStride, bf16{0}), factors(kStride, narrow_to<bf16>(1.0f));
    for (int e = 0; e < kExperts; e++)
        for (int k = 0; k < kDim; k++) router[e * kStride + k] = narrow_to<bf16>(next());
    std::copy_n(&router[3 * kStride], kDim, &router[5 * kStride]);
    std::copy_n(&router[4 * kStride], kDim, &router[7 * kStride]);
    router[7 * kStride + 20].bits ^= 1;
    for (int t = 0; t < kTokens; t++) {
        for (int k = 0; k < kDim; k++) x[t][k] = narrow_to<bf16>(next());
        RmsNorm<bf16>{factors.data(), 1e-6f}(x[t], kDim, x[t]);
    }
    for (int task = 0; task < experts.score_tasks(kTokens); task++)
        experts.score(task, kTokens, x, router.data(), nullptr, kDim);
    uint64_t hash = 1469598103934665603u;
    bool ordered = true;
    for (int t = 0; t < kTokens; t++) {
        experts.choose(route, t);
        bool has_third = false;
        for (const auto *each = chosen.choices_of(t), *end = each + kChosen; each < end; each++) {
            uint32_t bits;
            std::memcpy(&bits, &each->weight, 4);
            hash = ((hash ^ each->expert) * 1099511628211u ^ bits) * 1099511628211u;
            has_third = has_third || each->expert == 3;
            ordered = ordered && (each->expert != 5 || has_third);
        }
    }
    std::printf("experts bfloat16 %d %d %016" PRIx64 " %d 0\n", kDim, kTokens, hash, ordered);
}

}  // namespace

int main() {
#if !defined(EMULATE_AMX)  // no register of the CPU is used, and a kernel refuses those that a CPU lacks
    if (!allow_tiles()) return 1;
#endif
    use_tiles();
    experts();
    for (int inputs : {448, 424})
        for (int rows : {1, 2, 3, 8, 20, 33, 70}) {
            for (auto name : {"bfloat16", "int8"}) products<bf16>(name, inputs, rows);
            for (const Stored& stored : kAll)
                if (Formats::find<bf16>(stored.name)) products<bf16>(stored.name, inputs, rows);
#if !defined(ONLY_BFLOAT16)  // compiles in half of the time
            for (auto name : {"float32", "int8", "int8_groups", "int4", "int4_min"}) products<float>(name, inputs, rows);
#endif
        }
    release_tiles();
}
