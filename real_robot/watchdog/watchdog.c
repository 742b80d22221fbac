/* Firmware of the hardware watchdog: a relay in the robot's safeguard input that is closed only while
 * valid beats arrive (wiring: docs/watchdog.md; protocol: client.py).
 *
 * The first part is a state machine without hardware, which tests compile with the system's compiler.
 * The second is the board, for any Arduino core (AVR, RP2040): copy this file to watchdog/watchdog.ino.
 */
#include <stdint.h>

#define LIMIT_MS 100   /* the relay opens when the last valid beat is older */
#define AHEAD 4        /* a counter may be this far ahead of the last: three beats may be lost */
#define DEBOUNCE_MS 50 /* a button counts once it has been still for so long */
#define BEAT_SIZE 5
#define STATUS_SIZE 6
#define BEAT 0xA5
#define STATUS 0x5A

/* Why the relay is open. Only the button leads back to CLOSED. */
enum { CLOSED = 0, STARTED = 1, SILENCE = 2, GARBAGE = 3, SEQUENCE = 4 };

struct watchdog {
    uint32_t heard_ms;   /* when the last valid beat came */
    uint32_t changed_ms; /* when the button's contact last changed */
    uint16_t limit_ms;
    uint16_t counter; /* of the last valid beat */
    uint8_t state;
    uint8_t fed;     /* whether the last beat is valid and young */
    uint8_t contact; /* the button's contact, as read last */
    uint8_t pressed; /* the button, debounced */
    uint8_t tell;    /* whether a status is due */
    uint8_t fill;    /* bytes in frame */
    uint8_t frame[BEAT_SIZE];
};

unsigned watchdog_size(void) { return sizeof(struct watchdog); }

/* CRC-16/CCITT-FALSE: polynomial 0x1021, begun with 0xFFFF. */
static uint16_t crc16(const uint8_t *data, uint8_t size) {
    uint16_t crc = 0xFFFF;
    while (size--) {
        crc ^= (uint16_t)(*data++ << 8);
        for (uint8_t bit = 0; bit < 8; bit++)
            crc = (uint16_t)((crc & 0x8000) ? (crc << 1) ^ 0x1021 : crc << 1);
    }
    return crc;
}

/* Open the relay. The first reason stays, and the button waits for another valid beat. */
static void open_relay(struct watchdog *w, uint8_t reason) {
    w->fed = 0;
    w->fill = 0;
    if (w->state == CLOSED) {
        w->state = reason;
        w->tell = 1;
    }
}

static void check_silence(struct watchdog *w, uint32_t now_ms) {
    if (w->fed && (uint32_t)(now_ms - w->heard_ms) > w->limit_ms)
        open_relay(w, SILENCE);
}

/* Start open. A button that is held down from the start is no press. */
void watchdog_begin(struct watchdog *w, uint16_t limit_ms, uint32_t now_ms) {
    w->heard_ms = w->changed_ms = now_ms;
    w->limit_ms = limit_ms;
    w->counter = 0;
    w->state = STARTED;
    w->contact = w->pressed = 1;
    w->fed = w->fill = 0;
    w->tell = 1;
}

/* Take a byte of the host. A beat that comes too late does not hide the silence before it. */
void watchdog_byte(struct watchdog *w, uint8_t byte, uint32_t now_ms) {
    check_silence(w, now_ms);
    w->frame[w->fill++] = byte;
    if (w->frame[0] != BEAT) {
        open_relay(w, GARBAGE);
        return;
    }
    if (w->fill < BEAT_SIZE)
        return;
    w->fill = 0;
    w->tell = 1;
    if (crc16(w->frame, 3) != (uint16_t)(w->frame[3] | w->frame[4] << 8)) {
        open_relay(w, GARBAGE);
        return;
    }
    uint16_t counter = (uint16_t)(w->frame[1] | w->frame[2] << 8);
    uint16_t ahead = (uint16_t)(counter - w->counter);
    if (w->fed && (ahead == 0 || ahead > AHEAD))
        open_relay(w, SEQUENCE);
    w->counter = counter;
    w->heard_ms = now_ms;
    w->fed = 1;
}

/* Look at the clock and at the button (1: its contact is closed). Call it often. */
void watchdog_poll(struct watchdog *w, uint32_t now_ms, uint8_t contact) {
    check_silence(w, now_ms);
    if (contact != w->contact) {
        w->contact = contact;
        w->changed_ms = now_ms;
    } else if (contact != w->pressed && (uint32_t)(now_ms - w->changed_ms) >= DEBOUNCE_MS) {
        w->pressed = contact;
        if (contact && w->fed) {
            w->state = CLOSED;
            w->tell = 1;
        }
    }
}

uint8_t watchdog_state(const struct watchdog *w) { return w->state; }

/* Whether a status is due; it is then written to `out`. */
uint8_t watchdog_status(struct watchdog *w, uint8_t out[STATUS_SIZE]) {
    if (!w->tell)
        return 0;
    w->tell = 0;
    out[0] = STATUS;
    out[1] = w->state;
    out[2] = (uint8_t)(w->limit_ms & 0xFF);
    out[3] = (uint8_t)(w->limit_ms >> 8);
    uint16_t crc = crc16(out, 4);
    out[4] = (uint8_t)(crc & 0xFF);
    out[5] = (uint8_t)(crc >> 8);
    return 1;
}

#ifdef ARDUINO
#include <Arduino.h>
#if defined(__AVR__)
#include <avr/wdt.h>
#endif

#define RELAY_PIN 2  /* high: the coil of a normally open relay is fed */
#define BUTTON_PIN 3 /* a button to ground */

static struct watchdog dog;

void setup(void) {
    digitalWrite(RELAY_PIN, LOW);
    pinMode(RELAY_PIN, OUTPUT);
    pinMode(BUTTON_PIN, INPUT_PULLUP);
    Serial.begin(115200);
    watchdog_begin(&dog, LIMIT_MS, millis());
    /* The chip's own watchdog: a program that hangs is reset, and starts open. */
#if defined(__AVR__)
    wdt_enable(WDTO_60MS);
#elif defined(ARDUINO_ARCH_RP2040)
    rp2040.wdt_begin(60);
#endif
}

void loop(void) {
    uint8_t out[STATUS_SIZE];
    for (uint8_t i = 0; i < 64 && Serial.available() > 0; i++)
        watchdog_byte(&dog, (uint8_t)Serial.read(), millis());
    watchdog_poll(&dog, millis(), digitalRead(BUTTON_PIN) == LOW);
    digitalWrite(RELAY_PIN, watchdog_state(&dog) == CLOSED ? HIGH : LOW);
    if (Serial.availableForWrite() >= STATUS_SIZE && watchdog_status(&dog, out))
        Serial.write(out, STATUS_SIZE);
#if defined(__AVR__)
    wdt_reset();
#elif defined(ARDUINO_ARCH_RP2040)
    rp2040.wdt_reset();
#endif
}
#endif
