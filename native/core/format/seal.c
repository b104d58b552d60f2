#include "format/seal.h"

#include "memory/layout.h"

#include <endian.h>
#include <string.h>

static uint64_t word_at(const uint8_t *from)
{
	uint64_t value;

	memcpy(&value, from, sizeof(value));
	return le64toh(value);
}

static uint64_t turned(uint64_t value, unsigned bits)
{
	return value << bits | value >> (64 - bits);
}

typedef struct mixer {
	uint64_t a, b, c, d;
} mixer;

static inline void mix(mixer *m, unsigned rounds)
{
	while (rounds--) {
		m->a += m->b;
		m->c += m->d;
		m->b = turned(m->b, 13) ^ m->a;
		m->d = turned(m->d, 16) ^ m->c;
		m->a = turned(m->a, 32) + m->d;
		m->c += m->b;
		m->d = turned(m->d, 21) ^ m->a;
		m->b = turned(m->b, 17) ^ m->c;
		m->c = turned(m->c, 32);
	}
}

static inline void absorb(mixer *m, uint64_t word)
{
	m->d ^= word;
	mix(m, 2);
	m->a ^= word;
}

/* SipHash-2-4 with 128 bits of result. */
static void sip(const uint8_t key[16], const uint8_t *data, uint64_t length,
                uint8_t out[SEAL_BYTES])
{
	uint64_t k0 = word_at(key), k1 = word_at(key + 8), last = length << 56, half;
	mixer m = {k0 ^ UINT64_C(0x736f6d6570736575), k1 ^ UINT64_C(0x646f72616e646f6d) ^ 0xee,
	           k0 ^ UINT64_C(0x6c7967656e657261), k1 ^ UINT64_C(0x7465646279746573)};
	uint64_t whole = length & ~UINT64_C(7);

	for (uint64_t at = 0; at < whole; at += 8)
		absorb(&m, word_at(data + at));
	for (uint64_t at = whole; at < length; at++)
		last |= (uint64_t)data[at] << 8 * (at - whole);
	absorb(&m, last);
	m.c ^= 0xee;
	mix(&m, 4);
	half = htole64(m.a ^ m.b ^ m.c ^ m.d);
	memcpy(out, &half, sizeof(half));
	m.b ^= 0xdd;
	mix(&m, 4);
	half = htole64(m.a ^ m.b ^ m.c ^ m.d);
	memcpy(out + 8, &half, sizeof(half));
}

void seal_make(const uint8_t *key, const char *topic, uint64_t id, const void *body,
               uint64_t length, uint8_t tag[SEAL_BYTES])
{
	uint8_t whole[2 * SEAL_BYTES + sizeof(id)];

	id = htole64(id);
	sip(key, (const uint8_t *)topic, strnlen(topic, SHMQ_NAME - 1), whole);
	sip(key, body, length, whole + SEAL_BYTES);
	memcpy(whole + 2 * SEAL_BYTES, &id, sizeof(id));
	sip(key, whole, sizeof(whole), tag);
}

bool seal_fits(const uint8_t *key, const char *topic, uint64_t id, const void *body,
               uint64_t length, const uint8_t *tag)
{
	uint8_t right[SEAL_BYTES], any = 0, differs = 0;

	for (unsigned i = 0; i < SHMQ_SEAL_KEY; i++)
		any |= key[i];
	if (!any)
		return false;
	seal_make(key, topic, id, body, length, right);
	for (unsigned i = 0; i < SEAL_BYTES; i++)
		differs |= right[i] ^ tag[i];
	return !differs;
}
