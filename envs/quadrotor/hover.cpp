// The hover environment on one CPU thread: LANES flights at once.
//
// The computation of `Quadrotor` (hover_env.py) and `Physics` (dynamics.py), to rounding. Tensors
// [k, B] have one column for each flight.
#include "lanes.h"

namespace {

constexpr int STATE = 17, BODY = 20, HIDDEN = 6, SEEN = 18, KNOWN = 28, MOTORS = 4;
constexpr int MOST = 7, BLEND = 0, DISTURBANCE = 6;  // task parameters

struct Settings {
    double dt, box, gravity, spread, start;
    double hover, position, velocity, action;  // of the reward
    double guidance, deviation[SEEN], upset[HIDDEN];
    double mixer[MOTORS * MOTORS];
    double vehicle[10], way[10];  // the parameters `numbers`, and from these to the other vehicle's
    double low[MOST], span[MOST];
    int64_t kinds[MOST];  // of the task parameters, by their place in `dynamics.NAMES`
    int64_t parameters, horizon, history;
};

struct Flights {
    float *state, *body, *hidden, *task;
    int64_t *count, *stream;
    int64_t size;
};

// Up to LANES flights: neighbours from `at`, or those in `rows`.
struct Group {
    const int64_t* rows;
    int64_t at, n;

    int64_t row(int i) const { return rows ? rows[at + i] : at + i; }
    Floats get(const float* from) const {
        if (!rows) return load(from + at, n);
        Floats x{};
        for (int i = 0; i < n; ++i) x[i] = from[row(i)];
        return x;
    }
    void put(float* to, const Floats& x) const {
        if (!rows) return store(to + at, x, n);
        for (int i = 0; i < n; ++i) to[row(i)] = x[i];
    }
    Random random(const int64_t* stream) const {
        Random made;
        for (int i = 0; i < n; ++i) made.key[i] = stream[2 * row(i)], made.drawn[i] = stream[2 * row(i) + 1];
        return made;
    }
    void keep(int64_t* stream, const Random& random) const {
        for (int i = 0; i < n; ++i) stream[2 * row(i) + 1] = random.drawn[i];
    }
};

// -------------------------------------------------------------------------------------- physics

// d state / dt while the rotors are asked for `command` and follow at `quickness`.
inline void derivative(const Settings& s, const Floats* x, const Floats* body, const Floats* command,
                       const Floats* quickness, Floats* slope) {
    const Floats &w = x[3], &i = x[4], &j = x[5], &k = x[6], &a = x[10], &b = x[11], &c = x[12];
    const Floats *u = x + 13, *still = body, *linear = body + 4, *quadratic = body + 8;
    const Floats *pull = body + 12, *gyro = body + 15;
    Floats push[4];
    for (int r = 0; r < 4; ++r) {
        Floats first{}, second{};
        for (int m = 0; m < MOTORS; ++m) {
            const float share = (float)s.mixer[r * MOTORS + m];
            first += share * u[m], second += share * (u[m] * u[m]);
        }
        push[r] = still[r] + linear[r] * first + quadratic[r] * second;
    }
    for (int d = 0; d < 3; ++d) slope[d] = x[7 + d];
    slope[3] = -0.5f * (i * a + j * b + k * c);
    slope[4] = 0.5f * (w * a + j * c - k * b);
    slope[5] = 0.5f * (w * b + k * a - i * c);
    slope[6] = 0.5f * (w * c + i * b - j * a);
    slope[7] = pull[0] + 2.0f * (i * k + w * j) * push[0];
    slope[8] = pull[1] + 2.0f * (j * k - w * i) * push[0];
    slope[9] = pull[2] + (1.0f - 2.0f * (i * i + j * j)) * push[0];
    slope[10] = push[1] + gyro[0] * (b * c);
    slope[11] = push[2] + gyro[1] * (c * a);
    slope[12] = push[3] + gyro[2] * (a * b);
    for (int m = 0; m < MOTORS; ++m) slope[13 + m] = (command[m] - u[m]) * quickness[m];
}

// One Runge-Kutta step of fourth order in place, then a unit attitude and speeds in [0, 1].
inline void fly(const Settings& s, Floats* x, const Floats* act, const Floats* body) {
    const float dt = (float)s.dt;
    Floats command[MOTORS], quickness[MOTORS], slope[STATE], sum[STATE], there[STATE];
    for (int m = 0; m < MOTORS; ++m) {
        command[m] = 0.5f * (act[m] + 1.0f);
        quickness[m] = command[m] > x[13 + m] ? body[18] : body[19];
    }
    derivative(s, x, body, command, quickness, sum);
    for (int k = 0; k < STATE; ++k) there[k] = x[k] + 0.5f * dt * sum[k];
    for (const float ahead : {0.5f, 1.0f}) {
        derivative(s, there, body, command, quickness, slope);
        for (int k = 0; k < STATE; ++k)
            sum[k] += 2.0f * slope[k], there[k] = x[k] + ahead * dt * slope[k];
    }
    derivative(s, there, body, command, quickness, slope);
    for (int k = 0; k < STATE; ++k) x[k] += dt / 6 * (sum[k] + slope[k]);
    const Floats norm = root(x[3] * x[3] + x[4] * x[4] + x[5] * x[5] + x[6] * x[6]);
    for (int k = 3; k < 7; ++k) x[k] /= norm;
    for (int k = 13; k < STATE; ++k) x[k] = clamped(x[k], 0.0f, 1.0f);
}

inline Floats reward(const Settings& s, const Floats* x, const Floats* act) {
    const Floats tilt = 5.0f * (x[4] * x[4] + x[5] * x[5] + x[6] * x[6]);
    const Floats place = x[0] * x[0] + x[1] * x[1] + x[2] * x[2];
    const Floats speed = x[7] * x[7] + x[8] * x[8] + x[9] * x[9];
    Floats effort{};
    for (int m = 0; m < MOTORS; ++m) {
        const Floats over = act[m] - (float)s.hover;
        effort += over * over;
    }
    const Floats wrong = (float)s.position * place + (float)s.velocity * speed + tilt;
    return 2.0f - 0.5f * (wrong + (float)s.action * effort);
}

// ---------------------------------------------------------------------------------- observations

inline void turn(const Floats* q, Floats* matrix) {
    const Floats &w = q[0], &x = q[1], &y = q[2], &z = q[3];
    matrix[0] = 1.0f - 2.0f * (y * y + z * z);
    matrix[1] = 2.0f * (x * y - w * z);
    matrix[2] = 2.0f * (x * z + w * y);
    matrix[3] = 2.0f * (x * y + w * z);
    matrix[4] = 1.0f - 2.0f * (x * x + z * z);
    matrix[5] = 2.0f * (y * z - w * x);
    matrix[6] = 2.0f * (x * z - w * y);
    matrix[7] = 2.0f * (y * z + w * x);
    matrix[8] = 1.0f - 2.0f * (x * x + y * y);
}

// Writes `known` [KNOWN, B] and the first SEEN numbers of each line of `seen` [B, ...].
inline void observe(const Settings& s, const Flights& f, const Group& g, const Floats* x, Random& random,
                    float* seen, float* known) {
    Floats all[KNOWN], noise[SEEN];
    for (int k = 0; k < 3; ++k) all[k] = x[k];
    turn(x + 3, all + 3);
    for (int k = 0; k < 6; ++k) all[12 + k] = x[7 + k], all[18 + k] = g.get(f.hidden + k * f.size);
    for (int m = 0; m < MOTORS; ++m) all[24 + m] = 2.0f * x[13 + m] - 1.0f;
    random.normal(noise, SEEN);
    for (int k = 0; k < KNOWN; ++k) g.put(known + k * f.size, all[k]);
    float lines[SEEN][LANES];
    for (int k = 0; k < SEEN; ++k) store(lines[k], all[k] + noise[k] * (float)s.deviation[k], LANES);
    const int64_t row = SEEN + MOTORS * s.history;
    for (int i = 0; i < g.n; ++i)
        for (int k = 0; k < SEEN; ++k) seen[g.row(i) * row + k] = lines[k][i];
}

// The line of `seen` after `act`: past actions move up by one.
inline void remember(const Settings& s, const float* before, const float (*act)[LANES], int i,
                     float* after) {
    if (!s.history) return;
    const int64_t kept = MOTORS * (s.history - 1);
    std::memcpy(after + SEEN, before + SEEN + MOTORS, kept * sizeof(float));
    for (int m = 0; m < MOTORS; ++m) after[SEEN + kept + m] = act[m][i];
}

// --------------------------------------------------------------------------------------- starts

// Quaternions of rotations by no more than a quarter turn: `tilted` (dynamics.py).
inline void tilted(const Floats* axis, const Floats& share, Floats* q, int64_t n) {
    for (int i = 0; i < n; ++i) {
        const float right = share[i] * 0.57079633f;
        float angle = std::cbrt(6 * right);
        for (int round = 0; round < 2; ++round) {
            const float miss = angle - std::sin(angle) - right;
            angle -= miss / std::fmax(1 - std::cos(angle), 1e-6f);
        }
        const float x = axis[0][i], y = axis[1][i], z = axis[2][i];
        const float scale = std::sin(angle / 2) / std::sqrt(x * x + y * y + z * z);
        q[0][i] = std::cos(angle / 2);
        for (int d = 0; d < 3; ++d) q[1 + d][i] = axis[d][i] * scale;
    }
}

// The vehicles of task vectors: `Vehicles.made`; returns what multiplies the disturbance.
inline Floats vehicle(const Settings& s, const Floats* task, Floats* made) {
    static constexpr int FIRST[] = {0, 0, 1, 4, 7, 8}, LAST[] = {0, 0, 3, 6, 7, 9};
    Floats stirred = all(1.0f);
    for (int k = 0; k < 10; ++k) made[k] = all((float)s.vehicle[k]);
    Floats value[MOST];
    for (int64_t p = 0; p < s.parameters; ++p) {
        value[p] = (float)s.low[p] + task[p] * (float)s.span[p];
        if (s.kinds[p] == BLEND)
            for (int k = 0; k < 10; ++k) made[k] += value[p] * (float)s.way[k];
    }
    for (int64_t p = 0; p < s.parameters; ++p) {
        const int64_t kind = s.kinds[p];
        if (kind == DISTURBANCE)
            stirred = value[p];
        else if (kind != BLEND)
            for (int k = FIRST[kind]; k <= LAST[kind]; ++k) made[k] *= value[p];
    }
    return stirred;
}

// `Physics.body` of vehicles under a force and torque.
inline void bodies(const Settings& s, const Floats* v, const Floats* hidden, Floats* body) {
    const Floats gain[4] = {1.0f / v[0], 1.0f / v[1], 1.0f / v[2], v[7] / v[3]};
    for (int r = 0; r < 4; ++r) {
        float sum = 0;
        for (int m = 0; m < MOTORS; ++m) sum += (float)s.mixer[r * MOTORS + m];
        body[r] = gain[r] * v[4] * sum;
        if (r) body[r] += hidden[2 + r] / v[r];
        body[4 + r] = gain[r] * v[5], body[8 + r] = gain[r] * v[6];
    }
    for (int d = 0; d < 3; ++d) body[12 + d] = hidden[d] / v[0];
    body[14] -= (float)s.gravity;
    body[15] = (v[2] - v[3]) / v[1], body[16] = (v[3] - v[1]) / v[2], body[17] = (v[1] - v[2]) / v[3];
    body[18] = 1.0f / v[8], body[19] = 1.0f / v[9];
}

inline void start(const Settings& s, const Flights& f, const Group& g, const float* given) {
    Random random = g.random(f.stream);
    Floats lots[11 + MOST], upset[9], made[10], hidden[HIDDEN], body[BODY], x[STATE];
    random.uniform(lots, 11 + (int)s.parameters);
    random.normal(upset, 9);
    g.keep(f.stream, random);
    Floats* task = lots + 11;
    for (int64_t p = 0; p < s.parameters; ++p) {
        if (given) task[p] = g.get(given + p * f.size);
        g.put(f.task + p * f.size, task[p]);
    }
    const Floats stirred = vehicle(s, task, made);
    for (int k = 0; k < HIDDEN; ++k) {
        hidden[k] = upset[k] * (float)s.upset[k] * stirred;
        g.put(f.hidden + k * f.size, hidden[k]);
    }
    bodies(s, made, hidden, body);
    for (int k = 0; k < BODY; ++k) g.put(f.body + k * f.size, body[k]);
    const Floats away = lots[0] >= (float)s.guidance ? all(1.0f) : all(0.0f);
    tilted(upset + 6, lots[1] * away, x + 3, g.n);
    for (int d = 0; d < 3; ++d) x[d] = (2.0f * lots[2 + d] - 1.0f) * ((float)s.spread * away);
    for (int d = 0; d < 6; ++d) x[7 + d] = 2.0f * lots[5 + d] - 1.0f;
    for (int m = 0; m < MOTORS; ++m) x[13 + m] = all((float)s.start);
    for (int k = 0; k < STATE; ++k) g.put(f.state + k * f.size, x[k]);
    for (int i = 0; i < g.n; ++i) f.count[g.row(i)] = 0;
}

inline Ints outside(const Settings& s, const Floats* x) {  // of the box
    const float box = (float)s.box;
    Ints left{};
    for (int d = 0; d < 3; ++d) left |= (x[d] > box) | (x[d] < -box);
    return left;
}

inline bool finite(const float* x, int64_t n) {
    Floats sum{};
    for (int64_t at = 0; at < n; at += LANES) sum += load(x + at, n - at < LANES ? n - at : LANES);
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += sum[i];
    return std::isfinite(total);
}

inline Group group(const int64_t* rows, int64_t at, int64_t end) {
    return {rows, at, end - at < LANES ? end - at : LANES};
}

}  // namespace

// One step of all flights; `before` and `seen` [B, SEEN + 4 history], `action` [B, 4]. Returns 1 and
// changes nothing if an action is not finite.
extern "C" int64_t hover_step(const Settings* s, const Flights* f, const float* action, const float* before,
                              float* seen, float* known, float* rewards, bool* terminated, bool* truncated) {
    if (!finite(action, MOTORS * f->size)) return 1;
    const int64_t row = SEEN + MOTORS * s->history;
    for (int64_t at = 0; at < f->size; at += LANES) {
        const Group g = group(nullptr, at, f->size);
        Floats x[STATE], body[BODY], act[MOTORS];
        for (int k = 0; k < STATE; ++k) x[k] = g.get(f->state + k * f->size);
        for (int k = 0; k < BODY; ++k) body[k] = g.get(f->body + k * f->size);
        float lines[MOTORS][LANES] = {};
        for (int i = 0; i < g.n; ++i)
            for (int m = 0; m < MOTORS; ++m) lines[m][i] = action[(at + i) * MOTORS + m];
        for (int m = 0; m < MOTORS; ++m) act[m] = clamped(load(lines[m], LANES), -1.0f, 1.0f);
        const Floats earned = reward(*s, x, act);
        fly(*s, x, act, body);
        for (int k = 0; k < STATE; ++k) g.put(f->state + k * f->size, x[k]);
        Random random = g.random(f->stream);
        observe(*s, *f, g, x, random, seen, known);
        g.keep(f->stream, random);
        const Ints left = outside(*s, x);
        g.put(rewards, left ? Floats{} : earned);
        for (int m = 0; m < MOTORS; ++m) store(lines[m], act[m], LANES);
        for (int i = 0; i < g.n; ++i) {
            terminated[at + i] = left[i];
            truncated[at + i] = ++f->count[at + i] >= s->horizon && !left[i];
            remember(*s, before + (at + i) * row, lines, i, seen + (at + i) * row);
        }
    }
    return 0;
}

// New flights in `rows`; `task` [D, B]: their task vectors (null: drawn).
extern "C" void hover_start(const Settings* s, const Flights* f, const int64_t* rows, int64_t n,
                            const float* task) {
    for (int64_t at = 0; at < n; at += LANES) start(*s, *f, group(rows, at, n), task);
}

// The observations of `rows`, which are at the start of a flight.
extern "C" void hover_observe(const Settings* s, const Flights* f, const int64_t* rows, int64_t n,
                              float* seen, float* known) {
    const int64_t row = SEEN + MOTORS * s->history;
    for (int64_t at = 0; at < n; at += LANES) {
        const Group g = group(rows, at, n);
        Floats x[STATE];
        for (int k = 0; k < STATE; ++k) x[k] = g.get(f->state + k * f->size);
        Random random = g.random(f->stream);
        observe(*s, *f, g, x, random, seen, known);
        g.keep(f->stream, random);
        for (int i = 0; i < g.n; ++i)
            for (int64_t k = SEEN; k < row; ++k) seen[g.row(i) * row + k] = (float)(2 * s->start - 1);
    }
}
