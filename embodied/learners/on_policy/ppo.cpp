// PPO's minibatches of one epoch, for a diagonal Gaussian policy and a value function, both MLPs.
//
// The computation of `Ppo._step` (ppo.py), with the slopes of the losses written out.
#include "linear.h"

namespace {

constexpr int64_t PIECE = 128;  // samples at once, so that activations stay in the cache
constexpr int METRICS = 6;      // policy_loss, value_loss, entropy, kl, clipped, grad_norm

struct Settings {
    AdamSettings adam;
    double clip, value_weight, entropy, grad_clip, step;
    double target_kl;  // 0: the learning rates are constant
    double rates[2];   // of the policy, of the value function
    int64_t normalize;  // advantages of each minibatch
    int64_t size, count, played;  // samples of a minibatch, minibatches, elements of an action
};

struct Table {  // the data, one line per sample; `order`: the samples of all minibatches
    const float *actor_input, *critic_input, *action, *old, *target, *advantage;
    const int64_t* order;
};

struct Work {
    const Settings& s;
    const Table& t;
    Mlp actor, critic;
    Parameter log_std;
    std::vector<float> scale, deviation_slope, advantage;  // [size of action], same, [minibatch]
    double sums[METRICS];
    double total;  // log-density of a standard normal z = 0, with the opposite sign
};

void gather(Mlp& net, const float* from, const int64_t* order, int64_t n) {
    for (int64_t b = 0; b < n; ++b)
        std::memcpy(&net.input[b * net.in_row], from + order[b] * net.in, net.in * sizeof(float));
}

void normalize(std::vector<float>& x) {
    double mean = 0, square = 0;
    for (float a : x) mean += a;
    mean /= x.size();
    for (float a : x) square += (a - mean) * (a - mean);
    const double scale = 1 / std::sqrt(square / x.size() + 1e-16);
    for (float& a : x) a = (float)((a - mean) * scale);
}

// The policy's loss and slopes of samples `order`[0, n), whose advantages are `advantage`.
void actor_losses(Work& w, const int64_t* order, const float* advantage, int64_t n) {
    const int64_t row = w.actor.out_row, all = w.actor.out, played = w.s.played;
    const float* mean = w.actor.layers.back().output.data();
    float* slope = w.actor.layers.back().output_slope.data();
    const double low = 1 - w.s.clip, high = 1 + w.s.clip;
    float z[played];
    for (int64_t b = 0; b < n; ++b) {
        const float* action = w.t.action + order[b] * played;
        float squares = 0;
        for (int64_t d = 0; d < played; ++d) {
            z[d] = (action[d] - mean[b * row + d]) * w.scale[d];
            squares += z[d] * z[d];
        }
        const double log_ratio = (float)(-0.5f * squares - w.total) - w.t.old[order[b]];
        const double ratio = std::exp(log_ratio), a = advantage[b];
        const double held = std::min(high, std::max(low, ratio));
        const bool passes = ratio * a <= held * a;
        w.sums[0] -= std::min(ratio * a, held * a);
        w.sums[3] += ratio - 1 - log_ratio;
        w.sums[4] += std::fabs(ratio - 1) > w.s.clip;
        const float pull = passes ? (float)(-a * ratio / w.s.size) : 0.0f;
        for (int64_t d = 0; d < played; ++d) {
            slope[b * row + d] = pull * z[d] * w.scale[d];
            w.deviation_slope[d] += pull * (z[d] * z[d] - 1);
        }
        for (int64_t d = played; d < all; ++d) slope[b * row + d] = 0;
    }
}

void critic_losses(Work& w, const int64_t* order, int64_t n) {
    const int64_t row = w.critic.out_row;
    const float* value = w.critic.layers.back().output.data();
    float* slope = w.critic.layers.back().output_slope.data();
    for (int64_t b = 0; b < n; ++b) {
        const double pull = value[b * row] - (double)w.t.target[order[b]];
        w.sums[1] += 0.5 * (pull * pull);
        slope[b * row] = (float)(w.s.value_weight * pull / w.s.size);
    }
}

void gradients(Work& w, const int64_t* order) {
    w.actor.clear(), w.critic.clear();
    const float* log_std = w.log_std.value;
    w.total = 0.5 * 1.8378770664093453 * w.s.played;  // log 2 pi
    for (int64_t d = 0; d < w.s.played; ++d) {
        w.scale[d] = std::exp(-log_std[d]), w.total += log_std[d];
        w.deviation_slope[d] = (float)-w.s.entropy;
    }
    for (int64_t b = 0; b < w.s.size; ++b) w.advantage[b] = w.t.advantage[order[b]];
    if (w.s.normalize) normalize(w.advantage);
    std::fill(w.sums, w.sums + METRICS, 0.0);
    for (int64_t at = 0; at < w.s.size; at += PIECE) {
        const int64_t n = std::min(PIECE, w.s.size - at);
        gather(w.actor, w.t.actor_input, order + at, n);
        gather(w.critic, w.t.critic_input, order + at, n);
        w.actor.forward(n), w.critic.forward(n);
        actor_losses(w, order + at, &w.advantage[at], n), critic_losses(w, order + at, n);
        w.actor.backward(n), w.critic.backward(n);
    }
    for (double& sum : w.sums) sum /= w.s.size;
    w.sums[2] = w.total + 0.5 * w.s.played;
}

// The total norm of the gradients.
double norm(const Work& w) {
    double squares = w.actor.squared_norm() + w.critic.squared_norm();
    for (float g : w.deviation_slope) squares += (double)g * g;
    return std::sqrt(squares);
}

double adapted(double scale, double base, double kl, double target) {
    scale = kl > 2 * target ? scale / 1.5 : kl < target / 2 ? scale * 1.5 : scale;
    return std::clamp(scale * base, 1e-5, 1e-2) / base;
}

}  // namespace

// Changes the parameters in place. `metrics` [count, METRICS]; `rate_scale`: a common factor of the
// learning rates, changed if `target_kl` is not 0. `log_std` without moments is not trained.
extern "C" void ppo_epoch(const Settings* s, const Table* t, const Parameter* actor,
                          int64_t actor_count, int64_t actor_activation, const Parameter* critic,
                          int64_t critic_count, int64_t critic_activation,
                          const Parameter* log_std, double* rate_scale, float* metrics) {
    const int64_t batch = std::min(PIECE, s->size);
    Work w{*s, *t, Mlp(actor, actor_count, (int)actor_activation, batch),
           Mlp(critic, critic_count, (int)critic_activation, batch), *log_std};
    w.scale.assign(log_std->columns, 0), w.deviation_slope.assign(log_std->columns, 0);
    w.advantage.assign(s->size, 0);
    for (int64_t i = 0; i < s->count; ++i) {
        gradients(w, t->order + i * s->size);
        if (!log_std->mean) std::fill(w.deviation_slope.begin(), w.deviation_slope.end(), 0.0f);
        float factor = 1;
        if (s->grad_clip > 0) {
            w.sums[5] = norm(w);
            factor = (float)std::min(1.0, s->grad_clip / (w.sums[5] + 1e-6));
        }
        if (s->target_kl > 0)
            *rate_scale = adapted(*rate_scale, s->rates[0], w.sums[3], s->target_kl);
        const double rates[2] = {s->rates[0] * *rate_scale, s->rates[1] * *rate_scale};
        const double step = s->step + i + 1;
        w.actor.step(factor, rates, step, s->adam), w.critic.step(factor, rates, step, s->adam);
        const float* slope = w.deviation_slope.data();
        if (log_std->mean)
            adam(*log_std, slope, log_std->columns, factor, rates[log_std->rate], step, s->adam);
        for (int m = 0; m < METRICS; ++m) metrics[i * METRICS + m] = (float)w.sums[m];
    }
}
