// One update of TD3: MLPs for the policy and the critics, the computation of `Td3._step` (td3.py) with
// the slopes of the losses written out.
#include "linear.h"

namespace {

constexpr int64_t PIECE = 128;  // samples at once, so that activations stay in the cache
constexpr int MEMBERS = 2;      // critics
enum { CRITIC, ACTOR };         // places of optimizers and of `rate` in parameters

struct Settings {
    AdamSettings adam[2];
    double rates[2], steps[2];  // `steps`: made so far
    double tau;
    int64_t size, played;             // samples, elements of an action
    int64_t squashes, follows, acts;  // tanh behind the policy; what this update trains
};

struct Table {  // one line per sample; `noise` of the target policy, clipped
    const float *actor_input, *critic_input, *next_actor_input, *next_critic_input;
    const float *action, *noise, *reward, *discount;
    Norm actor, critic;
};

struct Networks {
    Network actor, target_actor, critics[MEMBERS], targets[MEMBERS];
};

struct Work {
    const Settings& s;
    const Table& t;
    const Networks& n;
    int64_t batch;
    Mlp critics[MEMBERS];
    double critic_loss = 0, q_mean = 0, actor_loss = 0;
};

// The actions of `net` behind the features in the input of a critic, plus `noise` if there is any.
void act(const Settings& s, Mlp& net, const float* noise, int64_t n, Mlp& critic) {
    const int64_t features = critic.in - s.played;
    if (s.squashes) activate(TANH, net.output(), n * net.out_row);
    for (int64_t b = 0; b < n; ++b)
        for (int64_t d = 0; d < s.played; ++d) {
            float a = net.output()[b * net.out_row + d];
            if (noise) a = std::min(1.0f, std::max(-1.0f, a + noise[b * s.played + d]));
            critic.input[b * critic.in_row + features + d] = a;
        }
}

// y = r + d min_i Q'_i(s', a') of samples [at, at + n).
void backups(const Work& w, Mlp& actor, Mlp* targets, int64_t at, int64_t n, float* y) {
    const int64_t features = targets[0].in - w.s.played;
    gather(actor, w.t.next_actor_input, w.t.actor, at, n, actor.in);
    actor.forward(n);
    gather(targets[0], w.t.next_critic_input, w.t.critic, at, n, features);
    act(w.s, actor, w.t.noise + at * w.s.played, n, targets[0]);
    targets[1].input = targets[0].input;
    targets[0].forward(n), targets[1].forward(n);
    for (int64_t b = 0; b < n; ++b) {
        const float q = std::min(targets[0].output()[b * targets[0].out_row],
                                 targets[1].output()[b * targets[1].out_row]);
        y[b] = w.t.reward[at + b] + w.t.discount[at + b] * q;
    }
}

void critic_losses(Work& w, int64_t at, int64_t n, const float* y) {
    for (Mlp& critic : w.critics) {
        const int64_t features = critic.in - w.s.played;
        gather(critic, w.t.critic_input, w.t.critic, at, n, features);
        for (int64_t b = 0; b < n; ++b)
            std::memcpy(&critic.input[b * critic.in_row + features],
                        w.t.action + (at + b) * w.s.played, w.s.played * sizeof(float));
        critic.forward(n);
        for (int64_t b = 0; b < n; ++b) {
            const double q = critic.output()[b * critic.out_row], error = q - y[b];
            w.critic_loss += error * error / w.s.size, w.q_mean += q / (w.s.size * MEMBERS);
            critic.output_slope()[b * critic.out_row] = (float)(2 * error / w.s.size);
        }
        critic.backward(n);
    }
}

void critic_step(Work& w) {
    const Networks& nets = w.n;
    Mlp actor(nets.target_actor, w.batch, false);
    Mlp targets[] = {Mlp(nets.targets[0], w.batch, false), Mlp(nets.targets[1], w.batch, false)};
    float y[PIECE];
    for (int64_t at = 0; at < w.s.size; at += PIECE) {
        const int64_t n = std::min(PIECE, w.s.size - at);
        backups(w, actor, targets, at, n, y);
        critic_losses(w, at, n, y);
    }
    for (Mlp& critic : w.critics) critic.step(1, w.s.rates, w.s.steps[CRITIC] + 1, w.s.adam[CRITIC]);
}

void actor_step(Work& w) {
    Mlp actor(w.n.actor, w.batch, true);
    Mlp& critic = w.critics[0];
    const int64_t features = critic.in - w.s.played;
    std::fill(critic.layers.back().output_slope.begin(), critic.layers.back().output_slope.end(), 0.0f);
    for (int64_t at = 0; at < w.s.size; at += PIECE) {
        const int64_t n = std::min(PIECE, w.s.size - at);
        gather(actor, w.t.actor_input, w.t.actor, at, n, actor.in);
        actor.forward(n);
        gather(critic, w.t.critic_input, w.t.critic, at, n, features);
        act(w.s, actor, nullptr, n, critic);
        critic.forward(n);
        for (int64_t b = 0; b < n; ++b) {
            w.actor_loss -= critic.output()[b * critic.out_row] / w.s.size;
            critic.output_slope()[b * critic.out_row] = -1.0f / w.s.size;
        }
        const float* slope = critic.to_input(n);
        for (int64_t b = 0; b < n; ++b)
            std::memcpy(actor.output_slope() + b * actor.out_row, slope + b * critic.in_row + features,
                        w.s.played * sizeof(float));
        if (w.s.squashes)
            activate_backward(TANH, actor.output(), actor.output_slope(), n * actor.out_row);
        actor.backward(n);
    }
    actor.step(1, w.s.rates, w.s.steps[ACTOR] + 1, w.s.adam[ACTOR]);
}

}  // namespace

// Changes the parameters in place; `metrics`: critic_loss, q_mean, actor_loss.
extern "C" void td3_update(const Settings* s, const Table* t, const Networks* n, float* metrics) {
    const int64_t batch = std::min(PIECE, s->size);
    Work w{*s, *t, *n, batch, {Mlp(n->critics[0], batch, true), Mlp(n->critics[1], batch, true)}};
    critic_step(w);
    if (s->acts) actor_step(w);
    if (s->follows)
        for (int i = 0; i < MEMBERS; ++i) soft_update(n->targets[i], n->critics[i], s->tau);
    if (s->acts) soft_update(n->target_actor, n->actor, s->tau);
    metrics[0] = (float)w.critic_loss, metrics[1] = (float)w.q_mean, metrics[2] = (float)w.actor_loss;
}
