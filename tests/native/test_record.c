/* nsqd's record, byte for byte (golden vectors taken from a real nsqd), and what cannot be one. */
#include "harness.h"

/* A record with attempts 0 and body "x3"; a message with body "hello", first attempt. */
static const uint8_t x3[] = {0x00, 0x00, 0x00, 0x1c, 0x18, 0xe9, 0xc5, 0x68, 0xcf, 0x6d, 0xc7,
                             0xa8, 0x00, 0x00, '1',  '8',  'a',  '1',  'f',  '2',  '6',  '2',
                             'a',  '9',  'a',  '6',  '9',  '0',  '0',  '1',  'x',  '3'};
static const uint8_t hello[] = {0x00, 0x00, 0x00, 0x1f, 0x18, 0xe9, 0xc5, 0x67, 0xf2,
                                0xe9, 0x27, 0x62, 0x00, 0x01, '1',  '8',  'a',  '1',
                                'f',  '2',  '5',  'f',  '3',  '7',  'a',  '6',  '9',
                                '0',  '0',  '0',  'h',  'e',  'l',  'l',  'o'};

static void golden_records_are_read(void)
{
	record r;
	uint64_t used;

	EQUAL(record_read(x3, sizeof(x3), 1000, &r, &used), 1);
	EQUAL(used, sizeof(x3));
	EQUAL(r.timestamp, 0x18e9c568cf6dc7a8);
	EQUAL(r.attempts, 0);
	EQUAL(r.id, 0x18a1f262a9a69001);
	EQUAL(r.length, 2);
	CHECK(!memcmp(r.body, "x3", 2));
	EQUAL(record_read(hello, sizeof(hello), 1000, &r, &used), 1);
	EQUAL(r.timestamp, 0x18e9c567f2e92762);
	EQUAL(r.attempts, 1);
	EQUAL(r.id, 0x18a1f25f37a69000);
	EQUAL(r.length, 5);
	CHECK(!memcmp(r.body, "hello", 5));
}

/* Write the record of a slot whose body is at `body`, as a spill does. Returns its size. */
static uint64_t written(uint8_t *to, const shmq_slot_desc *s, const uint8_t *body)
{
	record r = record_of(s, body, s->length, 0);
	uint64_t size = record_bytes(&r);

	record_write(to, size, &r);
	return size;
}

static void golden_records_are_written(void)
{
	shmq_slot_desc s = {.id = 0x18a1f262a9a69001, .timestamp = 0x18e9c568cf6dc7a8, .length = 2};
	uint8_t out[64] = {0};

	EQUAL(written(out, &s, (const uint8_t *)"x3"), sizeof(x3));
	CHECK(!memcmp(out, x3, sizeof(x3)));
	s = (shmq_slot_desc){
		.id = 0x18a1f25f37a69000, .timestamp = 0x18e9c567f2e92762, .length = 5, .attempts = 1};
	EQUAL(written(out, &s, (const uint8_t *)"hello"), sizeof(hello));
	CHECK(!memcmp(out, hello, sizeof(hello)));
}

static void extremes_come_back(void)
{
	static const struct {
		uint64_t id;
		int64_t timestamp;
		uint16_t attempts;
		uint32_t length;
	} some[] = {{0, 0, 0, 0},
	            {UINT64_MAX, INT64_MAX, 65535, 1},
	            {1, -1, 256, 70000},
	            {UINT64_C(1) << 63, INT64_MIN, 1, 3}};
	uint8_t *body = malloc(70000), *out = malloc(70030);

	memset(body, 0x5a, 70000);
	for (size_t i = 0; i < sizeof(some) / sizeof(some[0]); i++) {
		shmq_slot_desc s = {.id = some[i].id,
		                    .timestamp = some[i].timestamp,
		                    .attempts = some[i].attempts,
		                    .length = some[i].length};
		record r;
		uint64_t used;

		EQUAL(written(out, &s, body), s.length + SHMQ_RECORD_HEAD);
		EQUAL(record_read(out, s.length + SHMQ_RECORD_HEAD, 70000, &r, &used), 1);
		EQUAL(used, s.length + SHMQ_RECORD_HEAD);
		EQUAL(r.id, s.id);
		EQUAL(r.timestamp, s.timestamp);
		EQUAL(r.attempts, s.attempts);
		EQUAL(r.length, s.length);
		CHECK(!memcmp(r.body, body, s.length));
	}
	free(body);
	free(out);
}

static void a_truncated_record_is_not_whole(void)
{
	record r;
	uint64_t used;

	for (size_t n = 0; n < sizeof(hello); n++) {
		uint8_t *copy = malloc(n ? n : 1); /* so that a read beyond is caught */

		memcpy(copy, hello, n);
		EQUAL(record_read(copy, n, 1000, &r, &used), 0);
		free(copy);
	}
}

static void impossible_lengths_are_refused(void)
{
	static const uint32_t lengths[] = {
		0, 1, 25, 26 + 1000 + SHMQ_RECORD_MORE + 1, 0x7fffffff, 0x80000000, 0xffffffff};
	uint8_t copy[sizeof(hello)];
	record r;
	uint64_t used;

	memcpy(copy, hello, sizeof(hello));
	for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
		for (int k = 0; k < 4; k++)
			copy[k] = (uint8_t)(lengths[i] >> (24 - 8 * k));
		EQUAL(record_read(copy, sizeof(copy), 1000, &r, &used), -1);
		EQUAL(record_read(copy, 4, 1000, &r, &used), -1);
	}
	copy[0] = copy[1] = copy[2] = 0;
	copy[3] = 26; /* an empty body is decodable */
	EQUAL(record_read(copy, sizeof(copy), 1000, &r, &used), 1);
	EQUAL(r.length, 0);
	EQUAL(used, 30);
}

/* Ids are opaque to nsqd: another producer's may not be hexadecimal. They stay distinct. */
static void foreign_ids_become_distinct_numbers(void)
{
	uint8_t copy[sizeof(hello)];
	record a, b;
	uint64_t used;

	memcpy(copy, hello, sizeof(hello));
	memcpy(copy + 14, "not-hexadecimal!", 16);
	EQUAL(record_read(copy, sizeof(copy), 1000, &a, &used), 1);
	copy[29] = '?';
	EQUAL(record_read(copy, sizeof(copy), 1000, &b, &used), 1);
	CHECK(a.id != b.id);
	memcpy(copy + 14, "ABCDEF0123456789", 16); /* upper case is not ours either */
	EQUAL(record_read(copy, sizeof(copy), 1000, &a, &used), 1);
	CHECK(a.id != 0xabcdef0123456789);
}

static void a_scan_stops_at_the_first_that_is_not_whole(void)
{
	uint8_t file[3 * sizeof(hello)];
	uint32_t records;
	uint64_t used;
	bool damaged;

	for (int i = 0; i < 3; i++)
		memcpy(file + (size_t)i * sizeof(hello), hello, sizeof(hello));
	for (size_t n = 0; n <= sizeof(file); n++) {
		EQUAL(shmq_records_scan(file, n, 1000, UINT32_MAX, &records, &used, &damaged), 0);
		EQUAL(records, n / sizeof(hello));
		EQUAL(used, n / sizeof(hello) * sizeof(hello));
		CHECK(!damaged);
	}
	file[sizeof(hello)] = 0xff;
	EQUAL(shmq_records_scan(file, sizeof(file), 1000, UINT32_MAX, &records, &used, &damaged), 0);
	EQUAL(records, 1);
	EQUAL(used, sizeof(hello));
	CHECK(damaged);
	EQUAL(shmq_records_scan(file, 0, 1000, UINT32_MAX, &records, &used, &damaged), 0);
	EQUAL(records, 0);
	CHECK(!damaged);
	file[sizeof(hello)] = 0;
	file[3] = 26 + 4 + SHMQ_RECORD_MORE + 1;
	EQUAL(shmq_records_scan(file, sizeof(file), 4, UINT32_MAX, &records, &used, &damaged), 0);
	EQUAL(records, 0);
	CHECK(damaged); /* longer than max_msg_size, and than shmq makes it */
}

int main(void)
{
	golden_records_are_read();
	golden_records_are_written();
	extremes_come_back();
	a_truncated_record_is_not_whole();
	impossible_lengths_are_refused();
	foreign_ids_become_distinct_numbers();
	a_scan_stops_at_the_first_that_is_not_whole();
	return 0;
}
