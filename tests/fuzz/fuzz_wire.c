/*
 * nsqd's TCP protocol where many commands come at a time. For any bytes the result is that of a
 * plain reader, and the same whether they come at once or in pieces. The first byte says how long
 * the pieces are.
 */
#include "../native/harness.h"

#include <sys/mman.h>

#define MOST 4096u
#define MAX_MSG_SIZE 1000
#define MAX_BODY_SIZE 2000

static uint8_t *wall; /* nobody may read from here on */

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc;
	(void)argv;
	wall = (uint8_t *)mmap(NULL, 2 * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
	                       0) +
	       MOST;
	EQUAL(mprotect(wall, MOST, PROT_NONE), 0);
	return 0;
}

/* The result: where bodies are and how long; or ids. */
typedef struct reading {
	uint64_t at[MOST], length[MOST], used;
	uint32_t n;
	int64_t bad;
	bool wrong;
} reading;

static reading expected, read_;

static void note(reading *r, uint64_t at, uint64_t length)
{
	r->at[r->n] = at;
	r->length[r->n++] = length;
}

static int64_t size_at(const uint8_t *at)
{
	return (int32_t)((uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3]);
}

/* `line` (may be nothing) | int32 BE size | body, again and again. */
static void plain_bodies(const uint8_t *data, uint64_t size, const char *line, reading *r)
{
	uint64_t head = strlen(line);

	while (size - r->used >= head + 4 && !memcmp(data + r->used, line, head)) {
		int64_t length = size_at(data + r->used + head);

		r->wrong = length <= 0 || length > MAX_MSG_SIZE;
		r->bad = r->wrong ? length : 0;
		if (r->wrong || size - r->used - head - 4 < (uint64_t)length)
			return;
		note(r, r->used + head + 4, (uint64_t)length);
		r->used += head + 4 + (uint64_t)length;
	}
}

/* MPUB lines, each with its batch; one of more than 5 is nobody's here. */
static void plain_batches(const uint8_t *data, uint64_t size, reading *r)
{
	while (size - r->used >= 15 && !memcmp(data + r->used, "MPUB t\n", 7)) {
		uint64_t at = r->used + 15;
		int64_t bytes = size_at(data + r->used + 7), count = size_at(data + r->used + 11);
		uint32_t before = r->n;

		if (bytes <= 0 || bytes > MAX_BODY_SIZE || count <= 0 || count > (MAX_BODY_SIZE - 4) / 5 ||
		    count > 5)
			return;
		while (count && size - at >= 4 && size_at(data + at) > 0 &&
		       size_at(data + at) <= MAX_MSG_SIZE &&
		       size - at - 4 >= (uint64_t)size_at(data + at)) {
			note(r, at + 4, (uint64_t)size_at(data + at));
			at += 4 + (uint64_t)size_at(data + at);
			count--;
		}
		if (count) {
			r->n = before;
			return;
		}
		r->used = at;
	}
}

static void plain_finishes(const uint8_t *data, uint64_t size, reading *r)
{
	for (; size - r->used >= 21 && !memcmp(data + r->used, "FIN ", 4); r->used += 21) {
		const char *text = (const char *)data + r->used + 4;
		char digits[17] = {0};

		memcpy(digits, text, 16);
		if (text[16] != '\n' || strspn(digits, "0123456789abcdef") != 16)
			return;
		note(r, strtoull(digits, NULL, 16), 0);
	}
}

typedef void reader(const uint8_t *data, uint64_t size, reading *r);

/* From r->used on, at most a few at a time, as a reader of a socket does. */
static void bodies(const uint8_t *data, uint64_t size, reading *r)
{
	shmq_body found[7];
	uint64_t used;
	uint32_t whole;

	do {
		r->wrong = shmq_wire_bodies(&(shmq_wire_input){.data = data + r->used,
		                                               .length = size - r->used,
		                                               .max_msg_size = MAX_MSG_SIZE},
		                            7, found, &whole, &used, &r->bad) < 0;
		for (uint32_t i = 0; i < whole; i++)
			note(r, (uint64_t)((const uint8_t *)found[i].data - data), found[i].length);
		r->used += used;
	} while (whole == 7);
}

static void publishes(const uint8_t *data, uint64_t size, reading *r)
{
	shmq_body found[5];
	uint64_t used;
	uint32_t n;

	do {
		n = shmq_wire_publishes(&(shmq_wire_input){.data = data + r->used,
		                                           .length = size - r->used,
		                                           .line = "PUB t\n",
		                                           .line_length = 6,
		                                           .max_msg_size = MAX_MSG_SIZE},
		                        5, found, &used);
		for (uint32_t i = 0; i < n; i++)
			note(r, (uint64_t)((const uint8_t *)found[i].data - data), found[i].length);
		r->used += used;
	} while (n == 5);
}

static void batches(const uint8_t *data, uint64_t size, reading *r)
{
	shmq_body found[5];
	uint64_t used;
	uint32_t n;

	do {
		n = shmq_wire_batch(&(shmq_wire_input){.data = data + r->used,
		                                       .length = size - r->used,
		                                       .line = "MPUB t\n",
		                                       .line_length = 7,
		                                       .max_msg_size = MAX_MSG_SIZE,
		                                       .max_body_size = MAX_BODY_SIZE},
		                    5, found, &used);
		for (uint32_t i = 0; i < n; i++)
			note(r, (uint64_t)((const uint8_t *)found[i].data - data), found[i].length);
		r->used += used;
	} while (n);
}

static void finishes(const uint8_t *data, uint64_t size, reading *r)
{
	uint64_t ids[3], used;
	uint32_t n;

	do {
		n = shmq_wire_finishes(data + r->used, size - r->used, ids, 3, &used);
		for (uint32_t i = 0; i < n; i++)
			note(r, ids[i], 0);
		r->used += used;
	} while (n == 3);
}

/* All that `step` looks at lies before `end`: it is moved to the wall. */
static void hold(reader *step, const uint8_t *input, uint64_t size, uint64_t piece, bool judge_bad)
{
	read_.n = 0, read_.used = 0, read_.wrong = false, read_.bad = 0;
	for (uint64_t end = piece < size ? piece : size;;
	     end = size - end < piece ? size : end + piece) {
		memcpy(wall - end, input, end);
		step(wall - end, end, &read_);
		if (end == size || read_.wrong)
			break;
	}
	EQUAL(read_.n, expected.n);
	EQUAL(read_.used, expected.used);
	if (judge_bad) {
		EQUAL(read_.wrong, expected.wrong);
		EQUAL(read_.bad, expected.bad);
	}
	CHECK(!memcmp(read_.at, expected.at, sizeof(*read_.at) * read_.n));
	CHECK(!memcmp(read_.length, expected.length, sizeof(*read_.length) * read_.n));
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
	uint64_t piece;

	if (size < 1 || size > MOST)
		return 0;
	piece = input[0] ? input[0] : MOST;
	input++, size--;
	for (int turn = 0; turn < 2; turn++, piece = MOST) {
		expected.n = 0, expected.used = 0, expected.wrong = false, expected.bad = 0;
		plain_bodies(input, size, "", &expected);
		hold(bodies, input, size, piece, true);
		expected.n = 0, expected.used = 0, expected.wrong = false, expected.bad = 0;
		plain_bodies(input, size, "PUB t\n", &expected);
		hold(publishes, input, size, piece, false);
		expected.n = 0, expected.used = 0;
		plain_batches(input, size, &expected);
		hold(batches, input, size, piece, false);
		expected.n = 0, expected.used = 0;
		plain_finishes(input, size, &expected);
		hold(finishes, input, size, piece, false);
	}
	return 0;
}
