/* Plays: leases, in memory and on disk. */
#include "stage.h"

static const shmq_lease_settings settings = {
	.name = "l", .ttl_ns = 10 * NS_PER_S, .grace_ns = NS_PER_S};

/* Read the whole lease. Returns false if it was ended meanwhile. */
static bool lease_read(uint32_t who, uint32_t *numbers)
{
	shmq_lease_cursor cursor;
	shmq_broker *b = k->actors[who].b;
	uint64_t ids[8], size;
	int64_t timestamps[8];
	int32_t attempts[8], offsets[9];
	uint8_t data[8 * BODY];
	uint32_t n;
	int r = shmq_lease_open(b, k->queue[0], k->serial[0], k->lease.id, 0, &cursor);

	if (!r)
		r = shmq_lease_measure(b, &cursor, 8, sizeof(data), &n, &size);
	if (!r)
		r = shmq_lease_copy(b, &cursor, n, size,
		                    &(shmq_columns){.ids = ids,
		                                    .timestamps = timestamps,
		                                    .attempts = attempts,
		                                    .offsets = offsets,
		                                    .data = data});
	if (r == SHMQ_LEASE_LOST)
		return false;
	EQUAL(r, 0);
	EQUAL(n, k->lease.count);
	for (uint32_t i = 0; i < n; i++) {
		shmq_message m = {.body = data + offsets[i],
		                  .length = (uint32_t)(offsets[i + 1] - offsets[i])};

		EQUAL(attempts[i], 1);
		numbers[i] = body_number(&m);
	}
	return true;
}

static void lease(uint32_t who, uint32_t n)
{
	int r = shmq_lease_take(k->actors[who].b, &k->holder,
	                        &(shmq_lease_wish){.max_bytes = 1 << 10, .n = n, .parts = 1}, soon(),
	                        &k->lease);

	if (r) {
		CHECK(r == SHMQ_EMPTY || r == SHMQ_GONE);
		k->lease.count = 0;
	} else if (!lease_read(who, k->leased)) {
		k->lease.count = 0; /* emptied, flushed, ... */
	}
	for (uint32_t i = 0; i < k->lease.count; i++)
		if (k->finished[0][k->leased[i]] == TAKEN)
			schedule_fail("message %u is leased after its finish", k->leased[i]);
}

/* Lease the records where they are on disk. */
static void lease_run(uint32_t who)
{
	uint64_t from = desc(0)->disk_read, to = desc(0)->disk_write;
	shmq_run run = {from, to, 0, 0, 1, &from};
	int r;

	if (from == to)
		return;
	for (uint64_t at = from; at < to; at += SHMQ_RECORD_HEAD + BODY, run.count++) {
		shmq_message m = {.body = k->disk + at + SHMQ_RECORD_HEAD, .length = BODY};

		k->leased[run.count] = body_number(&m);
	}
	run.bytes = run.count * BODY;
	r = shmq_lease_take(k->actors[who].b, &k->holder,
	                    &(shmq_lease_wish){.max_bytes = 1 << 10, .n = 8, .parts = 1, .run = &run},
	                    soon(), &k->lease);
	CHECK(!r || r == SHMQ_EMPTY || r == SHMQ_GONE);
	if (!r && k->lease.count != run.count) { /* there was something before it */
		uint64_t messages;

		r = shmq_lease_return(k->actors[who].b, &k->holder, k->lease.id, soon(), &messages);
		CHECK(!r || r == SHMQ_LEASE_LOST);
		r = SHMQ_EMPTY;
	}
	if (r)
		k->lease.count = 0;
}

static void lease_finish(uint32_t who)
{
	uint64_t messages;
	int r;

	for (uint32_t i = 0; i < k->lease.count; i++)
		k->finished[0][k->leased[i]] = BEGUN_TO;
	r = shmq_lease_finish(k->actors[who].b, &k->holder, k->lease.id, soon(), &messages);
	CHECK(!r || r == SHMQ_LEASE_LOST || r == SHMQ_LEASE_FENCED || r == SHMQ_GONE);
	CHECK(r || messages == k->lease.count);
	for (uint32_t i = 0; i < k->lease.count; i++)
		k->finished[0][k->leased[i]] = r ? OPEN : TAKEN;
}

static void lease_1(void)
{
	lease(1, 2);
}

static void lease_run_1(void)
{
	lease_run(1);
}

static void lease_finish_1(void)
{
	lease_finish(1);
}

static void lease_return_1(void)
{
	uint64_t messages;
	int r = shmq_lease_return(k->actors[1].b, &k->holder, k->lease.id, soon(), &messages);

	CHECK(!r || r == SHMQ_LEASE_LOST);
}

static void lease_read_2(void)
{
	uint32_t numbers[8];

	if (lease_read(2, numbers))
		CHECK(!memcmp(numbers, k->leased, k->lease.count * sizeof(*numbers)));
}

/* The next incarnation of the name. */
static void lease_holder_open_2(void)
{
	shmq_lease_holder next;
	shmq_lease all[4];
	uint32_t n;

	EQUAL(shmq_lease_holder_open(k->actors[2].b, k->queue[0], k->serial[0], &settings, soon(),
	                             &next),
	      0);
	EQUAL(shmq_lease_list(k->actors[2].b, &next, all, 4, soon(), &n), 0);
	CHECK(n <= 1 && (!n || all[0].count == k->lease.count));
}

static void lease_end_2(void)
{
	uint64_t messages;
	int r = shmq_lease_end(k->actors[2].b, k->queue[0], k->serial[0], k->lease.id, true, soon(),
	                       &messages);

	CHECK(!r || r == SHMQ_LEASE_LOST);
}

void come_to_lease(void)
{
	k->leases = true;
	schedule_as(1);
	EQUAL(shmq_lease_holder_open(k->actors[1].b, k->queue[0], k->serial[0], &settings, soon(),
	                             &k->holder),
	      0);
	schedule_as(OUTSIDE);
}

static void begin_to_lease(void)
{
	begin_with_supervisor();
	come_to_lease();
}

static void begin_leased(void)
{
	begin_to_lease();
	schedule_as(1);
	lease(1, 2);
	schedule_as(OUTSIDE);
	EQUAL(k->lease.count, 2);
}

static void begin_leased_and_came_back(void)
{
	begin_leased();
	schedule_as(1);
	take(1, 0, 1);
	requeue_1();
	schedule_as(OUTSIDE);
	k->out_of_order = true;
}

static void begin_leased_and_spilled(void)
{
	begin_read_half_to_lease();
	schedule_as(1);
	lease(1, 2);
	schedule_as(OUTSIDE);
}

static void begin_to_lease_on_disk(void)
{
	begin_to_lease();
	schedule_as(3);
	spill_3();
	schedule_as(OUTSIDE);
}

static void begin_leased_on_disk(void)
{
	begin_to_lease_on_disk();
	schedule_as(1);
	lease_run(1);
	schedule_as(OUTSIDE);
	EQUAL(k->lease.on_disk, 2);
}

static const play table[] = {
	/* the actors: 0 publishes, 1 takes, 2 one or the other, 3 supervises */
	PLAY("lease, prepend", begin_read_half_to_lease, publish_one_0, lease_1, NULL, prepend_3),
	PLAY("lease what is on disk, prepend", begin_read_half_to_lease, NULL, lease_run_1, NULL,
	     prepend_3),
	PLAY("publish, lease", begin_to_lease, publish_one_0, lease_1),
	PLAY("publish, lease, empty", begin_to_lease, publish_one_0, lease_1, empty_2),
	PLAY("publish, lease, spill", begin_to_lease, publish_one_0, lease_1, NULL, spill_3),
	PLAY("finish a lease, read it", begin_leased, publish_one_0, lease_finish_1, lease_read_2),
	PLAY("return a lease, read it", begin_leased, publish_one_0, lease_return_1, lease_read_2),
	PLAY("return a lease, one came back", begin_leased_and_came_back, NULL, lease_return_1,
	     lease_read_2),
	PLAY("finish a lease, end it", begin_leased, NULL, lease_finish_1, lease_end_2),
	PLAY("finish a lease, another incarnation", begin_leased, NULL, lease_finish_1,
	     lease_holder_open_2),
	PLAY("finish a lease, expire", begin_leased, NULL, lease_finish_1, lease_read_2, expire_3),
	PLAY("finish a lease, empty", begin_leased, NULL, lease_finish_1, empty_2),
	PLAY("finish a lease, rebuild", begin_leased, publish_one_0, lease_finish_1, NULL, rebuild_3),
	PLAY("return a lease, restore", begin_leased_and_spilled, NULL, lease_return_1, NULL,
	     restore_3),
	PLAY("finish a lease, flush", begin_leased, NULL, lease_finish_1, lease_read_2, flush_3),
	PLAY("finish a lease, prepend for a flush", begin_leased_and_spilled, NULL, lease_finish_1,
	     NULL, prepend_flush_3),
	PLAY("publish, lease what is on disk, restore", begin_to_lease_on_disk, publish_one_0,
	     lease_run_1, NULL, restore_3),
	PLAY("lease what is on disk, empty", begin_to_lease_on_disk, NULL, lease_run_1, empty_2),
	PLAY("finish what is on disk, restore", begin_leased_on_disk, NULL, lease_finish_1, NULL,
	     restore_3),
	PLAY("finish what is on disk, spill", begin_leased_on_disk, publish_one_0, lease_finish_1, NULL,
	     spill_3),
	PLAY("finish what is on disk, empty", begin_leased_on_disk, NULL, lease_finish_1, empty_2),
	PLAY("finish what is on disk, flush", begin_leased_on_disk, NULL, lease_finish_1, NULL,
	     flush_3),
	PLAY("finish what is on disk, expire", begin_leased_on_disk, NULL, lease_finish_1, NULL,
	     expire_3),
	PLAY("return what is on disk, restore", begin_leased_on_disk, publish_one_0, lease_return_1,
	     NULL, restore_3),
};

const plays lease_plays = {table, sizeof(table) / sizeof(table[0])};
