// Linear layers on one CPU thread: matrix products, activations and Adam, for small MLPs.
//
// Matrices are row-major; what a product reads or writes by vectors has rows of a multiple of WIDTH
// floats ("padded"), with zeros behind the last element.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
constexpr int WIDTH = 16, COLUMNS = 4;  // floats of a vector; vectors of a block (32 registers)
#elif defined(__AVX__)
constexpr int WIDTH = 8, COLUMNS = 2;
#else
constexpr int WIDTH = 4, COLUMNS = 2;
#endif
constexpr int ROWS = 6;  // of a block

typedef float Vector __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

inline int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

// ------------------------------------------------------------------------------------ products

// C[R][V vectors] = (add ? C : bias or 0) + A[R][depth] P, P packed [depth][V vectors].
template <int R, int V>
inline void block(int64_t depth, const float* a, int64_t a_row, int64_t a_column,
                  const float* packed, const float* bias, bool add, float* c, int64_t c_row) {
    Vector sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            const float* from = add ? c + r * c_row : bias;
            sum[r][v] = from ? *(const Vector*)(from + v * WIDTH) : Vector{};
        }
    for (int64_t k = 0; k < depth; ++k) {
        Vector b[V];
        for (int v = 0; v < V; ++v) b[v] = *(const Vector*)(packed + (k * V + v) * WIDTH);
        for (int r = 0; r < R; ++r) {
            const float scale = a[r * a_row + k * a_column];
            for (int v = 0; v < V; ++v) sum[r][v] += scale * b[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) *(Vector*)(c + r * c_row + v * WIDTH) = sum[r][v];
}

template <int V>
void column_block(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_column,
                  const float* b, int64_t b_row, const float* bias, bool add, float* c,
                  int64_t c_row, std::vector<float>& space) {
    space.resize(depth * V * WIDTH);
    for (int64_t k = 0; k < depth; ++k)
        std::memcpy(&space[k * V * WIDTH], b + k * b_row, V * WIDTH * sizeof(float));
    const float* p = space.data();
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        block<ROWS, V>(depth, a + r * a_row, a_row, a_column, p, bias, add, c + r * c_row, c_row);
    a += r * a_row, c += r * c_row;
    switch (rows - r) {
        case 5: block<5, V>(depth, a, a_row, a_column, p, bias, add, c, c_row); break;
        case 4: block<4, V>(depth, a, a_row, a_column, p, bias, add, c, c_row); break;
        case 3: block<3, V>(depth, a, a_row, a_column, p, bias, add, c, c_row); break;
        case 2: block<2, V>(depth, a, a_row, a_column, p, bias, add, c, c_row); break;
        case 1: block<1, V>(depth, a, a_row, a_column, p, bias, add, c, c_row); break;
    }
}

// C[rows][columns] = (add ? C : bias or 0) + A B; A(r, k) = a[r * a_row + k * a_column]; B, C, bias
// padded: `columns` is a multiple of WIDTH.
inline void product(int64_t rows, int64_t depth, int64_t columns, const float* a, int64_t a_row,
                    int64_t a_column, const float* b, int64_t b_row, const float* bias, bool add,
                    float* c, int64_t c_row) {
    static thread_local std::vector<float> space;
    int64_t n = 0;
    for (; n + COLUMNS * WIDTH <= columns; n += COLUMNS * WIDTH)
        column_block<COLUMNS>(rows, depth, a, a_row, a_column, b + n, b_row,
                              bias ? bias + n : nullptr, add, c + n, c_row, space);
    for (; n < columns; n += WIDTH)
        column_block<1>(rows, depth, a, a_row, a_column, b + n, b_row, bias ? bias + n : nullptr,
                        add, c + n, c_row, space);
}

// --------------------------------------------------------------------------------- activations

enum Activation { TANH = 0, RELU = 1 };

// Branch-free, so that loops over them become vector code.

inline uint32_t to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float turns = x * 1.44269504f;
    const int32_t n = (int32_t)(turns + std::copysign(0.5f, turns));
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    float y = 1.0f / 5040;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return y * from_bits((uint32_t)(n + 127) << 23);
}

inline float hyperbolic(float x) {  // tanh; absolute error below 2e-7
    const float size = std::fabs(x), square = x * x;
    const float e = exponential(-2.0f * (size > 20.0f ? 20.0f : size));
    const float far = std::copysign((1.0f - e) / (1.0f + e), x);
    float near = -1382.0f / 155925;  // the Taylor series
    near = near * square + 62.0f / 2835;
    near = near * square - 17.0f / 315;
    near = near * square + 2.0f / 15;
    near = near * square - 1.0f / 3;
    near = x + x * square * near;
    const uint32_t mask = -(uint32_t)(size < 0.35f);
    return from_bits((to_bits(near) & mask) | (to_bits(far) & ~mask));
}

inline void activate(int kind, float* x, int64_t n) {
    if (kind == TANH)
        for (int64_t i = 0; i < n; ++i) x[i] = hyperbolic(x[i]);
    else
        for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 0 ? 0 : x[i];  // keeps NaN, as torch does
}

// slope *= d activation / d input, from the activation's output `y`.
inline void activate_backward(int kind, const float* y, float* slope, int64_t n) {
    if (kind == TANH)
        for (int64_t i = 0; i < n; ++i) slope[i] *= 1.0f - y[i] * y[i];
    else
        for (int64_t i = 0; i < n; ++i) slope[i] = y[i] > 0 ? slope[i] : 0.0f;
}

// ---------------------------------------------------------------------------------- parameters

struct Parameter {  // of Python: the tensor, Adam's moments, which learning rate
    float *value, *mean, *square;
    int64_t rows, columns, rate;
};

struct AdamSettings {
    double beta1, beta2, eps, weight_decay;
};

// One step of Adam on a parameter from its gradient (rows of `row` floats) times `scale`.
inline void adam(const Parameter& p, const float* gradient, int64_t row, float scale, double rate,
                 double step, const AdamSettings& s) {
    const float size = (float)(rate / (1 - std::pow(s.beta1, step)));
    const float root = (float)std::sqrt(1 - std::pow(s.beta2, step));
    const float b1 = (float)(1 - s.beta1), b2 = (float)(1 - s.beta2), eps = (float)s.eps;
    const float keep2 = (float)s.beta2, decay = (float)s.weight_decay;
    for (int64_t r = 0; r < p.rows; ++r) {
        float* __restrict value = p.value + r * p.columns;
        float* __restrict mean = p.mean + r * p.columns;
        float* __restrict square = p.square + r * p.columns;
        const float* __restrict g = gradient + r * row;
        for (int64_t i = 0; i < p.columns; ++i) {
            const float slope = g[i] * scale + decay * value[i];
            mean[i] += b1 * (slope - mean[i]);
            square[i] = keep2 * square[i] + b2 * slope * slope;
            value[i] -= size * mean[i] / (std::sqrt(square[i]) / root + eps);
        }
    }
}

// ----------------------------------------------------------------------------------------- MLP

inline double squares(const std::vector<float>& x) {  // its sum; a multiple of WIDTH elements
    Vector sum{};
    for (size_t i = 0; i < x.size(); i += WIDTH) {
        const Vector part = *(const Vector*)&x[i];
        sum += part * part;
    }
    double total = 0;
    for (int i = 0; i < WIDTH; ++i) total += sum[i];
    return total;
}

// The sum of a line of `row` floats, padded.
inline float sum(const float* x, int64_t row) {
    Vector parts{};
    for (int64_t i = 0; i < row; i += WIDTH) parts += *(const Vector*)(x + i);
    float total = 0;
    for (int i = 0; i < WIDTH; ++i) total += parts[i];
    return total;
}

struct Network {  // of Python: of each layer weight and bias, of normed ones scale and shift too
    const Parameter* parameters;
    int64_t count, activation;
    int64_t turned, normed;  // weights are [in, out], not [out, in]; hidden layers have LayerNorm
};

constexpr float LAYER_NORM_EPS = 1e-5f;

struct Layer {
    Parameter weight, bias;  // [out, in] or, turned, [in, out]; [1, out]
    Parameter scale, shift;  // [1, out], of LayerNorm
    bool turned, normed;
    int64_t in, out, in_row, out_row, row;         // row: of weight_slope
    std::vector<float> forward, backward, offset;  // W^T [in, out_row], W [out, in_row], bias
    std::vector<float> weight_slope, bias_slope;   // as the weight, padded; [out_row]
    std::vector<float> output, output_slope;       // [batch, out_row]
    std::vector<float> gain, base;                 // scale and shift, padded
    std::vector<float> scale_slope, shift_slope;   // [out_row]
    std::vector<float> normal, inverse;            // [batch, out_row], [batch]: 1 / std

    void normalize(int64_t batch) {  // `output`, in place
        const float count = (float)out, spare = (float)(out_row - out);
        for (int64_t b = 0; b < batch; ++b) {
            float *x = &output[b * out_row], *h = &normal[b * out_row];
            const float mean = sum(x, out_row) / count;
            Vector parts{};
            for (int64_t i = 0; i < out_row; i += WIDTH) {
                const Vector away = *(const Vector*)(x + i) - mean;
                *(Vector*)(h + i) = away;
                parts += away * away;
            }
            float squared = -spare * mean * mean;  // the padding is 0, and so -mean away
            for (int i = 0; i < WIDTH; ++i) squared += parts[i];
            const float scale = 1.0f / std::sqrt(squared / count + LAYER_NORM_EPS);
            inverse[b] = scale;
            std::fill(h + out, h + out_row, 0.0f);
            for (int64_t i = 0; i < out_row; i += WIDTH) {
                const Vector value = *(const Vector*)(h + i) * scale;
                *(Vector*)(h + i) = value;
                *(Vector*)(x + i) = value * *(const Vector*)&gain[i] + *(const Vector*)&base[i];
            }
        }
    }

    // The slope of the norm's output to that of its input, in place; `learn`: and gradients.
    void normalize_backward(int64_t batch, float* slopes, bool learn) {
        const float share = 1.0f / (float)out;
        for (int64_t b = 0; b < batch; ++b) {
            float* slope = slopes + b * out_row;
            const float* h = &normal[b * out_row];
            Vector one{}, two{};
            for (int64_t i = 0; i < out_row; i += WIDTH) {
                Vector g = *(const Vector*)(slope + i);
                const Vector value = *(const Vector*)(h + i);
                if (learn) {
                    *(Vector*)&scale_slope[i] += g * value;
                    *(Vector*)&shift_slope[i] += g;
                }
                g *= *(const Vector*)&gain[i];
                *(Vector*)(slope + i) = g;
                one += g, two += g * value;
            }
            float first = 0, second = 0;
            for (int i = 0; i < WIDTH; ++i) first += one[i], second += two[i];
            first *= share, second *= share;
            for (int64_t i = 0; i < out_row; i += WIDTH) {
                const Vector value = *(const Vector*)(h + i);
                Vector& to = *(Vector*)(slope + i);
                to = (to - first - value * second) * inverse[b];
            }
            std::fill(slope + out, slope + out_row, 0.0f);
        }
    }

    void copy(bool learns) {  // of the parameters, padded; `backward` only if it is needed
        float* near = (turned ? forward : backward).data();  // the one that lies as the weight does
        float* far = (turned ? backward : forward).data();
        const int64_t lines = weight.rows, width = weight.columns;
        const int64_t far_row = turned ? in_row : out_row;
        if (turned || learns)
            for (int64_t i = 0; i < lines; ++i)
                std::memcpy(near + i * row, weight.value + i * width, width * sizeof(float));
        constexpr int64_t TILE = 16;  // squares, so that both sides stay in the cache
        if (!turned || learns)
            for (int64_t i0 = 0; i0 < lines; i0 += TILE)
                for (int64_t j0 = 0; j0 < width; j0 += TILE)
                    for (int64_t j = j0; j < std::min(j0 + TILE, width); ++j)
                        for (int64_t i = i0; i < std::min(i0 + TILE, lines); ++i)
                            far[j * far_row + i] = weight.value[i * width + j];
        std::memcpy(offset.data(), bias.value, out * sizeof(float));
        if (!normed) return;
        std::memcpy(gain.data(), scale.value, out * sizeof(float));
        std::memcpy(base.data(), shift.value, out * sizeof(float));
    }
};

// A sequence of linear layers with an activation behind each but the last.
struct Mlp {
    std::vector<Layer> layers;
    int activation;
    bool learns;
    int64_t in, in_row, out, out_row;
    std::vector<float> input, input_slope;  // [batch, in_row]

    Mlp(const Parameter* parameters, int64_t count, int activation, int64_t batch)
        : Mlp(Network{parameters, count, activation, 0, 0}, batch, true) {}

    // A network that does not learn has no `backward`.
    Mlp(const Network& net, int64_t batch, bool learns)
        : layers((net.count + 2 * net.normed) / (net.normed ? 4 : 2)),
          activation((int)net.activation),
          learns(learns) {
        const Parameter* next = net.parameters;
        for (Layer& l : layers) {
            l.weight = *next++, l.bias = *next++;
            l.turned = net.turned;
            l.normed = net.normed && &l != &layers.back();
            if (l.normed) l.scale = *next++, l.shift = *next++;
            l.in = net.turned ? l.weight.rows : l.weight.columns;
            l.out = net.turned ? l.weight.columns : l.weight.rows;
            l.in_row = padded(l.in), l.out_row = padded(l.out);
            l.row = padded(l.weight.columns);
            l.forward.assign(l.in * l.out_row, 0), l.offset.assign(l.out_row, 0);
            l.output.assign(batch * l.out_row, 0);
            if (l.normed) {
                l.gain.assign(l.out_row, 0), l.base.assign(l.out_row, 0);
                l.normal.assign(batch * l.out_row, 0), l.inverse.assign(batch, 0);
                l.scale_slope.assign(l.out_row, 0), l.shift_slope.assign(l.out_row, 0);
            }
            if (learns) {
                l.backward.assign(l.out * l.in_row, 0), l.bias_slope.assign(l.out_row, 0);
                l.weight_slope.assign(l.weight.rows * l.row, 0);
                l.output_slope.assign(batch * l.out_row, 0);
            }
            l.copy(learns);
        }
        in = layers.front().in, in_row = layers.front().in_row;
        out = layers.back().out, out_row = layers.back().out_row;
        input.assign(batch * in_row, 0);
    }

    void copy() {  // of the parameters, which others may have changed
        for (Layer& l : layers) l.copy(learns);
    }

    void clear() {  // gradients
        for (Layer& l : layers)
            for (auto* slope : {&l.weight_slope, &l.bias_slope, &l.scale_slope, &l.shift_slope})
                std::fill(slope->begin(), slope->end(), 0.0f);
    }

    const float* forward(int64_t batch) {  // of `input`; returns [batch, out_row]
        const float* x = input.data();
        int64_t row = in_row;
        for (Layer& l : layers) {
            product(batch, l.in, l.out_row, x, row, 1, l.forward.data(), l.out_row,
                    l.offset.data(), false, l.output.data(), l.out_row);
            if (l.normed) l.normalize(batch);
            if (&l != &layers.back()) activate(activation, l.output.data(), batch * l.out_row);
            x = l.output.data(), row = l.out_row;
        }
        return x;
    }

    // The last layer's output and the slope of it, which the caller writes before `backward`.
    float* output() { return layers.back().output.data(); }
    float* output_slope() { return layers.back().output_slope.data(); }

    void backward(int64_t batch) {  // adds the gradients of `output_slope`
        for (int64_t i = (int64_t)layers.size() - 1; i >= 0; --i) {
            gradients(i, batch);
            if (i) before(i, batch, layers[i - 1].output_slope.data(), true);
        }
    }

    const float* to_input(int64_t batch) {  // `output_slope` to that of `input` [batch, in_row]
        input_slope.resize(batch * in_row);
        for (int64_t i = (int64_t)layers.size() - 1; i >= 0; --i)
            before(i, batch, i ? layers[i - 1].output_slope.data() : input_slope.data(), false);
        return input_slope.data();
    }

    void gradients(int64_t i, int64_t batch) {  // of the parameters of layer i, from its slope
        Layer& l = layers[i];
        const float* x = i ? layers[i - 1].output.data() : input.data();
        const float* slope = l.output_slope.data();
        float* to = l.weight_slope.data();
        if (l.turned)
            product(l.in, batch, l.out_row, x, 1, l.in_row, slope, l.out_row, nullptr, true, to, l.row);
        else
            product(l.out, batch, l.in_row, slope, 1, l.out_row, x, l.in_row, nullptr, true, to, l.row);
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t o = 0; o < l.out_row; ++o) l.bias_slope[o] += slope[b * l.out_row + o];
    }

    // The slope of what layer i gets, before its activation and norm; `learn`: the norm's gradients.
    void before(int64_t i, int64_t batch, float* to, bool learn) {
        Layer& l = layers[i];
        product(batch, l.out, l.in_row, l.output_slope.data(), l.out_row, 1, l.backward.data(),
                l.in_row, nullptr, false, to, l.in_row);
        if (!i) return;
        activate_backward(activation, layers[i - 1].output.data(), to, batch * l.in_row);
        if (layers[i - 1].normed) layers[i - 1].normalize_backward(batch, to, learn);
    }

    double squared_norm() const {  // of all gradients
        double sum = 0;
        for (const Layer& l : layers) {
            sum += squares(l.weight_slope) + squares(l.bias_slope);
        }
        return sum;
    }

    void step(float scale, const double* rates, double step, const AdamSettings& s) {
        for (Layer& l : layers) {
            adam(l.weight, l.weight_slope.data(), l.row, scale, rates[l.weight.rate], step, s);
            adam(l.bias, l.bias_slope.data(), l.out_row, scale, rates[l.bias.rate], step, s);
            if (!l.normed) continue;
            adam(l.scale, l.scale_slope.data(), l.out_row, scale, rates[l.scale.rate], step, s);
            adam(l.shift, l.shift_slope.data(), l.out_row, scale, rates[l.shift.rate], step, s);
        }
        copy();
    }
};

struct Norm {  // of observations: (x - mean) / std, at most `limit`; no mean: x as it is
    const float *mean, *std, *limit;
};

// Lines [at, at + n) of `from` to the first `width` inputs of `net`, normalized.
inline void gather(Mlp& net, const float* from, const Norm& norm, int64_t at, int64_t n,
                   int64_t width) {
    for (int64_t b = 0; b < n; ++b) {
        float* to = &net.input[b * net.in_row];
        std::memcpy(to, from + (at + b) * width, width * sizeof(float));
        if (!norm.mean) continue;
        const float most = *norm.limit;
        for (int64_t i = 0; i < width; ++i) {
            const float x = (to[i] - norm.mean[i]) / norm.std[i];
            to[i] = x < -most ? -most : x > most ? most : x;
        }
    }
}

// Polyak averaging of parameters: target <- target + tau (online - target).
inline void soft_update(const Network& target, const Network& online, double tau) {
    for (int64_t i = 0; i < target.count; ++i) {
        float* to = target.parameters[i].value;
        const float* from = online.parameters[i].value;
        const int64_t n = target.parameters[i].rows * target.parameters[i].columns;
        for (int64_t k = 0; k < n; ++k) to[k] += (float)tau * (from[k] - to[k]);
    }
}
