/* What a policy of rotor speeds sees of a flight, and what its actions mean. */
#ifndef POLICY_FLIGHT_H
#define POLICY_FLIGHT_H
#include "policy.h"

@DEFINES@
/* C: thrust of a rotor in N, C0 + C1 u + C2 u^2 of the share u of its highest speed */

typedef struct {
    float obs[POLICY_INPUTS]; /* its end holds the past actions, oldest first */
    float action[POLICY_ACTIONS];
} policy_flight_t;

/* before the first step: as if it had hovered */
static inline void policy_flight_begin(policy_flight_t *f)
{
    for (int i = 18; i < POLICY_INPUTS; i++) f->obs[i] = POLICY_HOVER;
    for (int i = 0; i < POLICY_ACTIONS; i++) f->action[i] = POLICY_HOVER;
}

/* place: m, from the set-point to the drone; q: attitude, w x y z, body to world; velocity: m/s,
 * world; rates: rad/s, body; thrust: N, of the rotors front right, back right, back left, front
 * left. To be called every POLICY_DT seconds. False, and nothing else changed, where one of them is
 * not finite: something else has to fly. */
static inline bool policy_flight_step(policy_flight_t *f, const float place[3], const float q[4],
                                      const float velocity[3], const float rates[3],
                                      float thrust[4])
{
    const float w = q[0], x = q[1], y = q[2], z = q[3];
    const float rotation[9] = {
        1.0f - 2.0f * (y * y + z * z), 2.0f * (x * y - w * z), 2.0f * (x * z + w * y),
        2.0f * (x * y + w * z), 1.0f - 2.0f * (x * x + z * z), 2.0f * (y * z - w * x),
        2.0f * (x * z - w * y), 2.0f * (y * z + w * x), 1.0f - 2.0f * (x * x + y * y),
    };
    for (int i = 0; i < 3; i++) f->obs[i] = place[i];
    for (int i = 0; i < 9; i++) f->obs[3 + i] = rotation[i];
    for (int i = 0; i < 3; i++) f->obs[12 + i] = velocity[i];
    for (int i = 0; i < 3; i++) f->obs[15 + i] = rates[i];
    float action[POLICY_CHUNK * POLICY_ACTIONS];
    if (!policy_evaluate(f->obs, action)) return false;
    for (int i = 18; i < POLICY_INPUTS - POLICY_ACTIONS; i++)
        f->obs[i] = f->obs[i + POLICY_ACTIONS];
    for (int i = 0; i < POLICY_ACTIONS; i++) {
        const float a = fminf(fmaxf(action[i], -1.0f), 1.0f), u = 0.5f * (a + 1.0f);
        f->action[i] = a;
        if (POLICY_HISTORY > 0) f->obs[POLICY_INPUTS - POLICY_ACTIONS + i] = a;
        thrust[i] = POLICY_C0 + POLICY_C1 * u + POLICY_C2 * u * u;
    }
    return true;
}
#endif
