/* An out-of-tree controller: the firmware's PID, and a policy while policy.enable is set. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "FreeRTOS.h"
#include "task.h"
#include "app.h"
#include "controller.h"
#include "controller_pid.h"
#include "param.h"
#include "platform_defaults.h"
#include "stabilizer_types.h"

#define POLICY_SELF_TEST
#include "policy_flight.h"

#define RADIANS 0.0174532925f

static uint8_t enable = 0;
static uint32_t hash = @HASH@; /* of the policy: what is on board */
static bool flies = false;
static policy_flight_t flight; /* not on the stabilizer's stack */
static float thrust[4];

void appMain(void)
{
    while (true) vTaskDelay(M2T(1000));
}

void controllerOutOfTreeInit(void)
{
    controllerPidInit();
    flies = false;
}

bool controllerOutOfTreeTest(void)
{
    return controllerPidTest() && policy_self_test() < 1e-4f;
}

static bool wanted(const setpoint_t *setpoint, const state_t *state, float place[3])
{
    place[0] = state->position.x - setpoint->position.x;
    place[1] = state->position.y - setpoint->position.y;
    place[2] = state->position.z - setpoint->position.z;
    if (!policy_finite(place, 3)) return false;
    for (int i = 0; i < 3; i++)
        if (!(fabsf(place[i]) <= POLICY_REACH)) return false; /* too far */
    return enable && setpoint->mode.x == modeAbs && setpoint->mode.y == modeAbs &&
           setpoint->mode.z == modeAbs;
}

/* the policy's thrusts, at its rate; false where it is not given numbers, or gives none */
static bool decide(const float place[3], const sensorData_t *sensors, const state_t *state,
                   const stabilizerStep_t step)
{
    if (!flies) policy_flight_begin(&flight);
    if (flies && !RATE_DO_EXECUTE(RATE_100_HZ, step)) return true;
    const quaternion_t *q = &state->attitudeQuaternion;
    const float attitude[4] = {q->w, q->x, q->y, q->z};
    const float velocity[3] = {state->velocity.x, state->velocity.y, state->velocity.z};
    const float rates[3] = {sensors->gyro.x * RADIANS, sensors->gyro.y * RADIANS,
                            sensors->gyro.z * RADIANS};
    return policy_flight_step(&flight, place, attitude, velocity, rates, thrust);
}

void controllerOutOfTree(control_t *control, const setpoint_t *setpoint,
                         const sensorData_t *sensors, const state_t *state,
                         const stabilizerStep_t step)
{
    float place[3];
    if (!wanted(setpoint, state, place) || !decide(place, sensors, state, step)) {
        if (flies) controllerPidInit(); /* nothing of before is in its integrators */
        if (flies) enable = 0; /* until somebody asks for it again */
        flies = false;
        controllerPid(control, setpoint, sensors, state, step);
        return;
    }
    flies = true;
    /* the inverse of the firmware's mixer: M1 front right, M2 back right, M3 back left, M4 front
     * left */
    const float arm = 0.707106781f * ARM_LENGTH, turn = THRUST2TORQUE;
    control->controlMode = controlModeForceTorque;
    control->thrustSi = thrust[0] + thrust[1] + thrust[2] + thrust[3];
    control->torqueX = arm * (-thrust[0] - thrust[1] + thrust[2] + thrust[3]);
    control->torqueY = arm * (-thrust[0] + thrust[1] + thrust[2] - thrust[3]);
    control->torqueZ = turn * (-thrust[0] + thrust[1] - thrust[2] + thrust[3]);
}

PARAM_GROUP_START(policy)
PARAM_ADD(PARAM_UINT8, enable, &enable)
PARAM_ADD(PARAM_UINT32 | PARAM_RONLY, hash, &hash)
PARAM_GROUP_STOP(policy)
