/*
 * Messages and nsqd's disk records, byte for byte (nsqio/nsq nsqd/message.go, go-diskqueue):
 *
 *   int32 BE length (26 + body) | int64 BE timestamp | uint16 BE attempts | 16 hex digits | body
 */
#include "internal.h"

#include <string.h>

static void put_be(uint8_t *to, uint64_t value, int bytes)
{
	for (int i = bytes; i--; value >>= 8)
		to[i] = (uint8_t)value;
}

static uint64_t get_be(const uint8_t *from, int bytes)
{
	uint64_t value = 0;

	for (int i = 0; i < bytes; i++)
		value = value << 8 | from[i];
	return value;
}

void record_write(uint8_t *to, const shmq_slot_desc *s, const uint8_t *body)
{
	static const char digits[] = "0123456789abcdef";

	put_be(to, s->length + 26u, 4);
	put_be(to + 4, (uint64_t)s->timestamp, 8);
	put_be(to + 12, s->attempts, 2);
	for (int i = 0; i < 16; i++)
		to[14 + i] = (uint8_t)digits[s->id >> (60 - 4 * i) & 15];
	memcpy(to + RECORD_HEAD, body, s->length);
}

static int hex_value(uint8_t c)
{
	return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Ids are 16 opaque bytes to nsqd; one that is not hexadecimal is kept as a number made of it. */
static uint64_t read_id(const uint8_t *from)
{
	uint64_t id = 0, mixed = UINT64_C(14695981039346656037);
	bool hex = true;

	for (int i = 0; i < 16; i++) {
		int v = hex_value(from[i]);

		hex &= v >= 0;
		id = id << 4 | (uint64_t)(v & 15);
		mixed = (mixed ^ from[i]) * UINT64_C(1099511628211);
	}
	return hex ? id : mixed;
}

int record_read(const uint8_t *from, uint64_t length, uint64_t max_msg_size, record *out,
                uint64_t *used)
{
	uint64_t size;

	if (length < 4)
		return 0;
	size = get_be(from, 4);
	if (!SANE(size >= 26 && size <= max_msg_size + 26))
		return -1;
	if (length < size + 4)
		return 0;
	out->timestamp = (int64_t)get_be(from + 4, 8);
	out->attempts = (uint16_t)get_be(from + 12, 2);
	out->id = read_id(from + 14);
	out->body = from + RECORD_HEAD;
	out->length = size - 26;
	*used = size + 4;
	return 1;
}

void record_place(shmq_slot_desc *s, uint8_t *body, const record *from)
{
	memcpy(body, from->body, from->length);
	s->id = from->id;
	s->timestamp = from->timestamp;
	s->attempts = from->attempts;
	s->length = (uint32_t)from->length;
	s->after = 0;
	s->heap = SHMQ_NONE;
}

int shmq_records_scan(const void *data, uint64_t length, uint64_t max_msg_size, uint32_t *records,
                      uint64_t *used, bool *damaged)
{
	const uint8_t *at = data;
	record ignored;
	uint64_t size;
	int r = 0;

	*records = 0;
	*used = 0;
	while (*used < length &&
	       (r = record_read(at + *used, length - *used, max_msg_size, &ignored, &size)) > 0) {
		*used += size;
		++*records;
	}
	*damaged = r < 0;
	return 0;
}
