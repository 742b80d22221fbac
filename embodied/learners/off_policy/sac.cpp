// One update of SAC: MLPs for the policy and the critics, the computation of `Sac._step` (sac.py)
// with the slopes of the losses written out.
#include "linear.h"

namespace {

constexpr int64_t PIECE = 128;  // samples at once, so that activations stay in the cache
constexpr float HALF_LOG_2PI = 0.91893853f, LOG_2 = 0.69314718f;
enum { CRITIC, ACTOR, TEMPERATURE };  // places of optimizers and of `rate` in parameters

struct Settings {
    AdamSettings adam[3];
    double rates[3], steps[3];  // `steps`: made so far
    double tau, low, high, entropy;  // bounds of log std; entropy to reach
    int64_t size, slices, played;    // samples of a slice, slices, elements of an action
    int64_t subset;                  // critics in a target
    int64_t soft, squashes, entropic, mean, acts;
};

struct Table {  // one line per sample, of the slices in turn; `noise`: for the last slice
    const float *actor_input, *critic_input, *next_actor_input, *next_critic_input;
    const float *action, *noise, *reward, *discount, *next_noise;
    const int64_t* chosen;  // [slices, subset] critics
    Norm actor, critic;
};

struct Networks {
    Network actor;
    const Network *critics, *targets;
    int64_t members;
    Parameter log_alpha;
};

// What is kept between updates: their sizes do not change.
struct Work {
    Mlp actor;
    std::vector<Mlp> critics, targets;
    std::vector<float> action, std;  // of a piece, [PIECE, played]
    std::vector<std::vector<int64_t>> lowest;  // for each critic, the samples where it is the minimum
    float backup[PIECE], log_prob[PIECE];
    double critic_loss, q_mean, actor_loss, entropy;

    Work(const Networks& n, int64_t played)
        : actor(n.actor, PIECE, true), action(PIECE * played), std(PIECE * played), lowest(n.members) {
        for (int64_t i = 0; i < n.members; ++i) {
            critics.emplace_back(n.critics[i], PIECE, true);
            targets.emplace_back(n.targets[i], PIECE, false);
        }
    }
};

struct Update {
    const Settings& s;
    const Table& t;
    const Networks& n;
    Work& w;
};

// log(1 - tanh(u)^2), which does not underflow.
inline float log_slope(float u) {
    const float a = -2.0f * u;
    return 2.0f * (LOG_2 - u - (a > 20.0f ? a : std::log1p(std::exp(a))));
}

// Actions of the policy for `count` samples and their log-densities, from the output of its network.
void sample(const Update& up, const float* noise, int64_t count) {
    const Settings& s = up.s;
    Work& w = up.w;
    const float low = (float)s.low, high = (float)s.high;
    for (int64_t b = 0; b < count; ++b) {
        const float* out = w.actor.output() + b * w.actor.out_row;
        float total = 0;
        for (int64_t d = 0; d < s.played; ++d) {
            const float raw = out[s.played + d], z = noise[b * s.played + d];
            const float log_std = s.soft ? low + (high - low) / 2 * (hyperbolic(raw) + 1)
                                         : std::min(high, std::max(low, raw));
            const float deviation = std::exp(log_std), u = out[d] + deviation * z;
            w.std[b * s.played + d] = deviation;
            w.action[b * s.played + d] = s.squashes ? hyperbolic(u) : u;
            total -= 0.5f * z * z + log_std + HALF_LOG_2PI + (s.squashes ? log_slope(u) : 0.0f);
        }
        w.log_prob[b] = total;
    }
}

// The input of all critics of `nets`: features of samples [at, at + count), and `action`.
void fill(const Update& up, std::vector<Mlp>& nets, const float* from, const float* action, int64_t at,
          int64_t count) {
    Mlp& first = nets[0];
    const int64_t features = first.in - up.s.played;
    gather(first, from, up.t.critic, at, count, features);
    for (int64_t b = 0; b < count; ++b)
        std::memcpy(&first.input[b * first.in_row + features], action + b * up.s.played,
                    up.s.played * sizeof(float));
    for (size_t i = 1; i < nets.size(); ++i)
        std::memcpy(nets[i].input.data(), first.input.data(), count * first.in_row * sizeof(float));
}

// y = r + d (min_i Q'_i(s', a') - alpha log pi(a'|s')) of samples [at, at + count).
void backups(const Update& up, int64_t slice, int64_t at, int64_t count, float alpha) {
    Work& w = up.w;
    gather(w.actor, up.t.next_actor_input, up.t.actor, at, count, w.actor.in);
    w.actor.forward(count);
    sample(up, up.t.next_noise + at * up.s.played, count);
    fill(up, w.targets, up.t.next_critic_input, w.action.data(), at, count);
    const int64_t* chosen = up.t.chosen + slice * up.s.subset;
    for (int64_t k = 0; k < up.s.subset; ++k) {
        Mlp& target = w.targets[chosen[k]];
        target.forward(count);
        for (int64_t b = 0; b < count; ++b) {
            const float q = target.output()[b * target.out_row];
            w.backup[b] = k ? std::min(w.backup[b], q) : q;
        }
    }
    for (int64_t b = 0; b < count; ++b) {
        const float bonus = up.s.entropic ? alpha * w.log_prob[b] : 0.0f;
        w.backup[b] = up.t.reward[at + b] + up.t.discount[at + b] * (w.backup[b] - bonus);
    }
}

void critic_losses(const Update& up, int64_t at, int64_t count) {
    Work& w = up.w;
    const double size = (double)up.s.size;
    fill(up, w.critics, up.t.critic_input, up.t.action + at * up.s.played, at, count);
    for (Mlp& critic : w.critics) {
        critic.forward(count);
        for (int64_t b = 0; b < count; ++b) {
            const double q = critic.output()[b * critic.out_row], error = q - w.backup[b];
            w.critic_loss += error * error / size, w.q_mean += q / (size * w.critics.size());
            critic.output_slope()[b * critic.out_row] = (float)(2 * error / size);
        }
        critic.backward(count);
    }
}

void critic_step(const Update& up, int64_t slice, float alpha) {
    Work& w = up.w;
    w.critic_loss = w.q_mean = 0;
    for (Mlp& critic : w.critics) critic.clear();
    for (Mlp& target : w.targets) target.copy();
    const int64_t begin = slice * up.s.size;
    for (int64_t at = 0; at < up.s.size; at += PIECE) {
        const int64_t count = std::min(PIECE, up.s.size - at);
        backups(up, slice, begin + at, count, alpha);
        critic_losses(up, begin + at, count);
    }
    const double step = up.s.steps[CRITIC] + slice + 1;
    for (Mlp& critic : w.critics) critic.step(1, up.s.rates, step, up.s.adam[CRITIC]);
    for (int64_t i = 0; i < up.n.members; ++i)
        soft_update(up.n.targets[i], up.n.critics[i], up.s.tau);
}

// The rows `mine` of all activations of a network to the front.
void keep(Mlp& net, const std::vector<int64_t>& mine) {
    for (Layer& l : net.layers)
        for (size_t k = 0; k < mine.size(); ++k) {
            if (mine[k] == (int64_t)k) continue;
            const int64_t from = mine[k] * l.out_row, to = k * l.out_row;
            std::memcpy(&l.output[to], &l.output[from], l.out_row * sizeof(float));
            if (!l.normed) continue;
            std::memcpy(&l.normal[to], &l.normal[from], l.out_row * sizeof(float));
            l.inverse[k] = l.inverse[mine[k]];
        }
}

// The values of a piece's actions; each critic's samples are those whose value it decides.
void values(const Update& up, int64_t count, float alpha) {
    Work& w = up.w;
    const int64_t members = up.n.members;
    for (auto& samples : w.lowest) samples.clear();
    for (Mlp& critic : w.critics) critic.forward(count);
    for (int64_t b = 0; b < count; ++b) {
        int64_t least = 0;
        float low = 0, total = 0;
        for (int64_t i = 0; i < members; ++i) {
            const float q = w.critics[i].output()[b * w.critics[i].out_row];
            total += q;
            if (!i || q < low) low = q, least = i;
        }
        if (!up.s.mean) w.lowest[least].push_back(b);
        for (int64_t i = 0; up.s.mean && i < members; ++i) w.lowest[i].push_back(b);
        const double value = up.s.mean ? total / members : low;
        w.actor_loss += ((double)alpha * w.log_prob[b] - value) / up.s.size;
        w.entropy -= (double)w.log_prob[b] / up.s.size;
    }
}

// The slope of the policy's loss with respect to its network's output, for a piece's samples.
void actor_slopes(const Update& up, const float* noise, int64_t count, float alpha) {
    const Settings& s = up.s;
    Work& w = up.w;
    const int64_t played = s.played, features = w.critics[0].in - played, row = w.actor.out_row;
    const float each = 1.0f / s.size, share = s.mean ? each / up.n.members : each;
    const float low = (float)s.low, high = (float)s.high;
    float* slope = w.actor.output_slope();
    std::fill(slope, slope + count * row, 0.0f);
    for (int64_t i = 0; i < up.n.members; ++i) {
        Mlp& critic = w.critics[i];
        const std::vector<int64_t>& mine = w.lowest[i];
        const int64_t m = (int64_t)mine.size();
        if (!m) continue;
        keep(critic, mine);
        for (int64_t k = 0; k < m; ++k) critic.output_slope()[k * critic.out_row] = -share;
        const float* to = critic.to_input(m);
        for (int64_t k = 0; k < m; ++k)
            for (int64_t d = 0; d < played; ++d)
                slope[mine[k] * row + d] += to[k * critic.in_row + features + d];
    }
    for (int64_t b = 0; b < count; ++b)
        for (int64_t d = 0; d < played; ++d) {
            const float a = w.action[b * played + d], raw = w.actor.output()[b * row + played + d];
            float& mean = slope[b * row + d];
            if (s.squashes) mean = mean * (1 - a * a) + each * alpha * 2 * a;
            const float log_std = mean * w.std[b * played + d] * noise[b * played + d] - each * alpha;
            const float th = hyperbolic(raw);
            const float inside = s.soft ? (high - low) / 2 * (1 - th * th) : raw >= low && raw <= high;
            slope[b * row + played + d] = log_std * inside;
        }
}

void actor_step(const Update& up, float alpha) {
    Work& w = up.w;
    w.actor_loss = w.entropy = 0;
    w.actor.clear();
    for (Mlp& critic : w.critics) {
        auto& slope = critic.layers.back().output_slope;
        std::fill(slope.begin(), slope.end(), 0.0f);
    }
    const int64_t begin = (up.s.slices - 1) * up.s.size;
    for (int64_t at = 0; at < up.s.size; at += PIECE) {
        const int64_t count = std::min(PIECE, up.s.size - at);
        const float* noise = up.t.noise + at * up.s.played;
        gather(w.actor, up.t.actor_input, up.t.actor, begin + at, count, w.actor.in);
        w.actor.forward(count);
        sample(up, noise, count);
        fill(up, w.critics, up.t.critic_input, w.action.data(), begin + at, count);
        values(up, count, alpha);
        actor_slopes(up, noise, count, alpha);
        w.actor.backward(count);
    }
    w.actor.step(1, up.s.rates, up.s.steps[ACTOR] + 1, up.s.adam[ACTOR]);
    const float gradient = (float)(w.entropy - up.s.entropy);
    adam(up.n.log_alpha, &gradient, 1, 1, up.s.rates[TEMPERATURE], up.s.steps[TEMPERATURE] + 1,
         up.s.adam[TEMPERATURE]);
}

}  // namespace

// Networks and space for updates of these sizes.
extern "C" void* sac_begin(const Networks* n, int64_t played) { return new Work(*n, played); }

extern "C" void sac_end(void* work) { delete static_cast<Work*>(work); }

// Changes the parameters in place; `metrics`: critic_loss, q_mean, actor_loss, entropy, temperature.
extern "C" void sac_update(void* work, const Settings* s, const Table* t, const Networks* n,
                           float* metrics) {
    Work& w = *static_cast<Work*>(work);
    const Update up{*s, *t, *n, w};
    const float alpha = std::exp(*n->log_alpha.value);
    w.actor.copy();
    for (Mlp& critic : w.critics) critic.copy();
    for (int64_t slice = 0; slice < s->slices; ++slice) critic_step(up, slice, alpha);
    metrics[0] = (float)w.critic_loss, metrics[1] = (float)w.q_mean;
    if (!s->acts) return;
    actor_step(up, alpha);
    metrics[2] = (float)w.actor_loss, metrics[3] = (float)w.entropy;
    metrics[4] = std::exp(*n->log_alpha.value);
}
