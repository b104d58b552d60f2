/*
 * Disk records: any bytes in place of a segment file. The records found lie inside, add up, and are
 * those that a plain reader of the format finds; and the queue takes them in.
 */
#include "../native/scene.h"

#define MOST 65536u

static scene *s;
static uint8_t *wall; /* nobody may read from here on */

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc;
	(void)argv;
	s = scene_make();
	wall = (uint8_t *)mmap(NULL, 2 * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
	                       0) +
	       MOST;
	EQUAL(mprotect(wall, MOST, PROT_NONE), 0);
	return 0;
}

/* int32 BE length | at least 26 bytes, at most max_msg_size + SHMQ_RECORD_MORE more */
static uint32_t plainly(const uint8_t *data, size_t size, uint64_t most, uint64_t *used,
                        bool *damaged)
{
	uint32_t n = 0;

	for (*used = 0, *damaged = false; size - *used >= 4; n++) {
		const uint8_t *at = data + *used;
		uint64_t length = (uint64_t)at[0] << 24 | (uint64_t)at[1] << 16 | (uint64_t)at[2] << 8 |
		                  at[3];

		if (length < 26 || length > most + SHMQ_RECORD_MORE + 26) {
			*damaged = true;
			break;
		}
		if (size - *used - 4 < length)
			break;
		*used += 4 + length;
	}
	return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
	const uint8_t *data = wall - size;
	static const int64_t dues[64];
	uint64_t used, plain_used, most = size ? 1000 : 0, taken_bytes;
	uint32_t records, plain, taken;
	bool damaged, plain_damaged;
	int r;

	if (size > MOST)
		return 0;
	memcpy(wall - size, input, size);
	EQUAL(shmq_records_scan(data, size, most, UINT32_MAX, &records, &used, &damaged), 0);
	plain = plainly(data, size, most, &plain_used, &plain_damaged);
	EQUAL(records, plain);
	EQUAL(used, plain_used);
	EQUAL(damaged, plain_damaged);
	if (!records)
		return 0;
	scene_restore(s);
	r = shmq_restore(s->w->supervisor, s->queue[0],
	                 &(shmq_records){.data = data, .length = used, .next_position = used}, soon(),
	                 &taken, &taken_bytes);
	CHECK(r == 0 || r == SHMQ_GONE);
	CHECK(taken <= records && taken_bytes <= used);
	if (records <= 64) {
		r = shmq_chunk_load(
				s->w->supervisor, s->queue[1],
				&(shmq_chunk_records){
					.data = data, .length = used, .dues = dues, .n = records, .position = 1 << 24},
				soon(), &taken);
		CHECK(r == 0 || r == SHMQ_GONE);
		CHECK(taken <= records);
	}
	(void)shmq_restore(s->w->supervisor, s->queue[2],
	                   &(shmq_records){.data = data, .length = size, .next_position = size}, soon(),
	                   &taken, &taken_bytes);
	return 0;
}
