/*
 * Messages and nsqd's disk records, byte for byte (nsqio/nsq nsqd/message.go, go-diskqueue):
 *
 *   int32 BE length (26 + body) | int64 BE timestamp | uint16 BE attempts | 16 hex digits | body
 */
#include "record.h"

#include "bounds.h"
#include "shmq.h"
#include "shmq_supervisor.h"

static uint16_t get_be16(const uint8_t *from)
{
	uint16_t value;

	memcpy(&value, from, sizeof(value));
	return be16toh(value);
}

static uint64_t get_be64(const uint8_t *from)
{
	uint64_t value;

	memcpy(&value, from, sizeof(value));
	return be64toh(value);
}

void record_write(uint8_t *to, const shmq_slot_desc *s, const uint8_t *body)
{
	uint32_t length = htobe32(s->length + 26u);
	uint64_t timestamp = htobe64((uint64_t)s->timestamp);
	uint16_t attempts = htobe16(s->attempts);

	memcpy(to, &length, sizeof(length));
	memcpy(to + 4, &timestamp, sizeof(timestamp));
	memcpy(to + 12, &attempts, sizeof(attempts));
	(void)put_id(to + 14, s->id);
	memcpy(to + SHMQ_RECORD_HEAD, body, s->length);
}

/* To nsqd an id is 16 opaque bytes. One that is not hexadecimal becomes a number that is made
 * from it. */
static uint64_t read_id(const uint8_t *from)
{
#define DIGIT 0x10u
	static const uint8_t values[256] = {
		['0'] = DIGIT,      ['1'] = DIGIT | 1,  ['2'] = DIGIT | 2,  ['3'] = DIGIT | 3,
		['4'] = DIGIT | 4,  ['5'] = DIGIT | 5,  ['6'] = DIGIT | 6,  ['7'] = DIGIT | 7,
		['8'] = DIGIT | 8,  ['9'] = DIGIT | 9,  ['a'] = DIGIT | 10, ['b'] = DIGIT | 11,
		['c'] = DIGIT | 12, ['d'] = DIGIT | 13, ['e'] = DIGIT | 14, ['f'] = DIGIT | 15,
	};
	uint64_t id = 0;
	unsigned all = DIGIT;

	for (int i = 0; i < 16; i++) {
		unsigned value = values[from[i]];

		all &= value;
		id = id << 4 | (value & 15);
	}
	if (all & DIGIT)
		return id;
#undef DIGIT
	id = UINT64_C(14695981039346656037);
	for (int i = 0; i < 16; i++)
		id = (id ^ from[i]) * UINT64_C(1099511628211);
	return id;
}

int record_size(const uint8_t *from, uint64_t length, uint64_t max_msg_size, uint64_t *size)
{
	if (length < 4)
		return 0;
	*size = (uint64_t)get_be32(from) + 4;
	if (!TRUST_CHECK(*size >= SHMQ_RECORD_HEAD && *size <= max_msg_size + SHMQ_RECORD_HEAD))
		return -1;
	return length >= *size;
}

int record_read(const uint8_t *from, uint64_t length, uint64_t max_msg_size, record *out,
                uint64_t *used)
{
	uint64_t size;
	int r = record_size(from, length, max_msg_size, &size);

	if (r <= 0)
		return r;
	out->timestamp = (int64_t)get_be64(from + 4);
	out->attempts = get_be16(from + 12);
	out->id = read_id(from + 14);
	out->body = from + SHMQ_RECORD_HEAD;
	out->length = size - SHMQ_RECORD_HEAD;
	*used = size;
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

int shmq_records_scan(const void *data, uint64_t length, uint64_t max_msg_size, uint32_t most,
                      uint32_t *records, uint64_t *used, bool *damaged)
{
	const uint8_t *at = data;
	uint64_t size;
	int r = 0;

	*records = 0;
	*used = 0;
	while (*used < length && *records < most &&
	       (r = record_size(at + *used, length - *used, max_msg_size, &size)) > 0) {
		*used += size;
		++*records;
	}
	*damaged = r < 0;
	return 0;
}

int shmq_records_decode(const void *records, uint64_t length, uint32_t count, uint64_t *ids,
                        int64_t *timestamps, int32_t *attempts, int32_t *offsets, uint8_t *data)
{
	const uint8_t *at = records;
	uint64_t used = 0, size, body = 0;
	record rec;

	if (length > INT32_MAX || (uint64_t)count * SHMQ_RECORD_HEAD > length)
		return SHMQ_CORRUPT;
	for (uint32_t i = 0; i < count; i++) {
		if (record_read(at + used, length - used, UINT32_MAX, &rec, &size) <= 0 ||
		    rec.length > length - (uint64_t)count * SHMQ_RECORD_HEAD - body)
			return SHMQ_CORRUPT;
		ids[i] = rec.id;
		timestamps[i] = rec.timestamp;
		attempts[i] = (uint16_t)(rec.attempts + 1);
		offsets[i] = (int32_t)body;
		memcpy(data + body, rec.body, rec.length);
		body += rec.length;
		used += size;
	}
	offsets[count] = (int32_t)body;
	return used == length ? 0 : SHMQ_CORRUPT;
}
