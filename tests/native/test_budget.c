/* Messages in use never take the room that publishing and spilling need; and a full budget never
 * stops the calls that would empty it. */
#include "one_queue.h"

static int publish(stage *x, const void *data, uint64_t length, uint32_t n, int64_t due)
{
	shmq_body bodies[64];
	uint64_t id;

	for (uint32_t i = 0; i < n; i++)
		bodies[i] = (shmq_body){data, length};
	return MAPPED(x->w, x->b, shmq_publish(x->p, bodies, n, due, soon(), &id));
}

static void in_flight_leaves_room_to_publish(void)
{
	stage x = stage_open(small_limits(300, 100), "c");
	shmq_message m[200];
	uint32_t got;

	for (int i = 0; i < 300; i++)
		EQUAL(publish(&x, "x", 1, 1, 0), 0);
	EQUAL(shmq_take(x.c, m, 200, soon(), &got), 0);
	EQUAL(got, 100);
	EQUAL(shmq_take(x.c, m + 100, 1, soon(), &got), SHMQ_EMPTY);
	for (int i = 0; i < 100; i++)
		EQUAL(publish(&x, "x", 1, 1, 0), 0);
	EQUAL(publish(&x, "x", 1, 1, 0), SHMQ_FULL);
	/* and a consumer without room sleeps, it does not spin on what it may not have */
	EQUAL(shmq_consumer_wait(x.c, shmq_now() + NS_PER_MS), SHMQ_TIMEOUT);
	EQUAL(shmq_finish(x.c, m, 1, NULL, soon()), 0);
	EQUAL(shmq_take(x.c, m, 1, soon(), &got), 0);
	EQUAL(publish(&x, "x", 1, 1, 0), 0);
	stage_close(x);
}

/* The in-flight budget is full of requeued messages that wait for READY ones, which nobody may
 * take: then it is their turn now. */
static void requeued_messages_fill_the_budget_and_still_come(void)
{
	stage x = stage_open(small_limits(300, 16), "c");
	shmq_message m[32];
	uint32_t got, n = 0;

	for (int i = 0; i < 200; i++)
		EQUAL(publish(&x, "x", 1, 1, 0), 0);
	EQUAL(shmq_take(x.c, m, 32, soon(), &got), 0);
	EQUAL(got, 16);
	EQUAL(shmq_requeue(x.c, m, 16, 0, NULL, soon()), 0);
	while (!shmq_take(x.c, m, 32, soon(), &got)) {
		n += got;
		EQUAL(shmq_finish(x.c, m, got, NULL, soon()), 0);
	}
	EQUAL(n, 200);
	stage_close(x);
}

static void a_restore_stops_at_the_budget(void)
{
	stage x = stage_open(small_limits(300, 50), "c");
	uint32_t slots[300], lengths[300], taken, n = 0;
	uint64_t positions[300], at = 0, used;
	shmq_spill s = {.slots = slots, .lengths = lengths, .positions = positions};
	uint8_t *disk = malloc(1 << 16);

	for (int i = 0; i < 300; i++)
		EQUAL(publish(&x, "x", 1, 1, 0), 0);
	EQUAL(shmq_spill_begin(x.w->supervisor, x.queue, SHMQ_SPILL_READY, 300, 1 << 16, soon(), &s),
	      0);
	EQUAL(s.count, 300);
	EQUAL(publish(&x, "x", 1, 1, 0), SHMQ_FULL); /* SPILLING counts until it is written */
	EQUAL(shmq_spill_encode(x.w->supervisor, &s, disk), 0);
	for (uint32_t i = 0; i < s.count; at += lengths[i++])
		positions[i] = at;
	EQUAL(shmq_spill_end(x.w->supervisor, &s, at, true, soon()), 0);
	/* nobody takes; the supervisor reads ahead as far as it may */
	for (;;) {
		uint64_t from = ld(&x.q->disk_read);

		EQUAL(shmq_restore(x.w->supervisor, x.queue,
		                   &(shmq_records){.data = disk + from,
		                                   .length = at - from,
		                                   .position = from,
		                                   .next_position = at},
		                   soon(), &taken, &used),
		      0);
		n += taken;
		if (!taken)
			break;
	}
	EQUAL(n, 50);
	for (int i = 0; i < 300; i++)
		EQUAL(publish(&x, "x", 1, 1, 0), 0);
	stage_close(x);
	free(disk);
}

static void deferred_messages_have_a_budget_too(void)
{
	stage x = stage_open(small_limits(300, 50), "c");
	int64_t due = shmq_realtime() + 3600 * NS_PER_S;
	uint32_t expired, came;

	for (int i = 0; i < 50; i++)
		EQUAL(publish(&x, "x", 1, 1, due), 0);
	EQUAL(publish(&x, "x", 1, 1, due), SHMQ_FULL);
	for (int i = 0; i < 300; i++)
		EQUAL(publish(&x, "x", 1, 1, 0), 0);
	EQUAL(shmq_expire(x.w->supervisor, x.queue,
	                  &(shmq_expiry){.realtime = shmq_realtime(), .limit = 100}, soon(), &expired,
	                  &came),
	      0);
	EQUAL(publish(&x, "x", 1, 1, due), SHMQ_FULL);
	stage_close(x);
}

/* Bytes: what is deferred may not take the arena from what is published. */
static void deferred_bytes_leave_room_to_publish(void)
{
	shmq_limits limits = small_limits(300, 300);
	int64_t due = shmq_realtime() + 3600 * NS_PER_S;
	uint32_t expired, came;
	uint8_t *body = calloc(1, 100000);
	stage x;

	limits.arena_size = 1 << 20;
	limits.max_msg_size = 1 << 18;
	x = stage_open(limits, "c");
	for (int i = 0; i < 12; i++) {
		if (publish(&x, body, 100000, 1, due))
			break;
		EQUAL(shmq_expire(x.w->supervisor, x.queue, &(shmq_expiry){.limit = 100}, soon(), &expired,
		                  &came),
		      0);
	}
	CHECK(ld(&x.q->in_use_bytes) <= 3 * limits.arena_size / 4);
	EQUAL(publish(&x, body, 100000, 1, 0), 0);
	free(body);
	stage_close(x);
}

/* Small messages in the large blocks of earlier ones: the whole blocks count. */
static void blocks_larger_than_their_bodies_count_in_full(void)
{
	shmq_limits limits = small_limits(1000, 1000);
	uint8_t *body = calloc(1, 4096), *disk = calloc(1, 1 << 20);
	uint32_t slots[300], lengths[300], got, taken, n = 0;
	uint64_t positions[300], at = 0, used;
	shmq_spill s = {.slots = slots, .lengths = lengths, .positions = positions};
	shmq_message m[256];
	stage x;

	limits.arena_size = 1 << 20;
	limits.max_msg_size = 1 << 18;
	x = stage_open(limits, "c");
	/* every byte of the arena in blocks of 4000 that belong to free slots */
	while (!publish(&x, body, 4000, 1, 0))
		n++;
	CHECK(n > 200);
	while (!shmq_take(x.c, m, 200, soon(), &got))
		EQUAL(shmq_finish(x.c, m, got, NULL, soon()), 0);
	/* messages of 1000 go to disk and come back, nobody takes */
	for (int round = 0; round < 5; round++) {
		for (n = 0; n < 100; n++)
			EQUAL(publish(&x, body, 1000, 1, 0), 0);
		EQUAL(shmq_spill_begin(x.w->supervisor, x.queue, SHMQ_SPILL_READY, 300, 1 << 19, soon(),
		                       &s),
		      0);
		EQUAL(shmq_spill_encode(x.w->supervisor, &s, disk + at), 0);
		for (uint32_t i = 0; i < s.count; at += lengths[i++])
			positions[i] = at;
		EQUAL(shmq_spill_end(x.w->supervisor, &s, at, true, soon()), 0);
	}
	do {
		uint64_t from = ld(&x.q->disk_read), to = from + 200 * 1030 < at ? from + 200 * 1030 : at;

		EQUAL(shmq_restore(x.w->supervisor, x.queue,
		                   &(shmq_records){.data = disk + from,
		                                   .length = to - from,
		                                   .position = from,
		                                   .next_position = to},
		                   soon(), &taken, &used),
		      0);
	} while (taken);
	CHECK(ld(&x.q->in_use_bytes) <= 3 * ld(&x.q->arena_committed) / 4);
	EQUAL(publish(&x, body, 4000, 1, 0), 0);
	free(body);
	free(disk);
	stage_close(x);
}

/* The bytes belong to free slots, and to the very slots that are about to be used. */
static void bytes_behind_free_slots_are_found(void)
{
	shmq_limits limits = small_limits(300, 300);
	uint8_t *body = calloc(1, 1 << 20);
	shmq_body two[2] = {{body, 400000}, {body, 100}};
	shmq_message m;
	uint32_t got;
	uint64_t id;
	stage x;

	limits.arena_size = 1 << 20;
	limits.max_msg_size = 700000;
	x = stage_open(limits, "c");
	EQUAL(publish(&x, body, 700000, 1, 0), 0);
	EQUAL(shmq_take(x.c, &m, 1, soon(), &got), 0);
	EQUAL(shmq_finish(x.c, &m, 1, NULL, soon()), 0);
	/* its slot, with its body, is to be the second of the next batch */
	while (world_view(x.w, x.queue)->free[(ld(&x.q->free_head) + 1) & ld(&x.q->ring_mask)] !=
	       m.slot) {
		shmq_message other;

		EQUAL(publish(&x, "x", 1, 1, 0), 0);
		EQUAL(shmq_take(x.c, &other, 1, soon(), &got), 0);
		EQUAL(shmq_finish(x.c, &other, 1, NULL, soon()), 0);
	}
	EQUAL(MAPPED(x.w, x.b, shmq_publish(x.p, two, 2, 0, soon(), &id)), 0);
	stage_close(x);
	free(body);
}

static void what_can_never_fit_is_refused_at_once(void)
{
	shmq_limits limits = small_limits(300, 50);
	uint8_t *body = calloc(1, 1 << 20);
	static shmq_body many[301];
	uint64_t id;
	stage x;

	limits.arena_size = 1 << 20;
	limits.max_msg_size = 1 << 19;
	x = stage_open(limits, "c");
	for (int i = 0; i < 301; i++)
		many[i] = (shmq_body){"x", 1};
	EQUAL(MAPPED(x.w, x.b, shmq_publish(x.p, many, 301, 0, soon(), &id)), SHMQ_TOO_BIG);
	EQUAL(shmq_publish(x.p, many, 51, shmq_realtime() + NS_PER_S, soon(), &id), SHMQ_TOO_BIG);
	EQUAL(publish(&x, body, (1 << 19) + 1, 1, 0), SHMQ_TOO_BIG);
	EQUAL(publish(&x, body, 1 << 19, 2, 0), SHMQ_TOO_BIG);
	EQUAL(shmq_publish(x.p, many, 300, 0, soon(), &id), 0);
	EQUAL(publish(&x, body, 1, 0, 0), SHMQ_INVALID);
	EQUAL(publish(&x, body, 0, 1, 0), SHMQ_INVALID);
	free(body);
	stage_close(x);
}

/* A publisher that waits leaves what it needs; the supervisor is rung; room clears the wish. */
static void a_waiting_publisher_says_what_it_needs(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_message m[300];
	uint32_t got, why;

	for (int i = 0; i < 300; i++)
		EQUAL(publish(&x, "x", 1, 1, 0), 0);
	EQUAL(shmq_supervisor_wait(x.w->supervisor, soon(), &why), 0);
	EQUAL(publish(&x, "0123456789", 10, 3, 0), SHMQ_FULL);
	EQUAL(ld(&x.q->need_slots), 3);
	EQUAL(ld(&x.q->need_bytes), 3 * arena_block_size(10));
	EQUAL(shmq_supervisor_wait(x.w->supervisor, soon(), &why), 0);
	CHECK(why & SHMQ_RING_SPILLER);
	EQUAL(shmq_take(x.c, m, 300, soon(), &got), 0);
	EQUAL(publish(&x, "0123456789", 10, 3, 0), 0);
	EQUAL(ld(&x.q->need_slots), 0);
	EQUAL(ld(&x.q->need_bytes), 0);
	stage_close(x);
}

int main(void)
{
	in_flight_leaves_room_to_publish();
	requeued_messages_fill_the_budget_and_still_come();
	a_restore_stops_at_the_budget();
	deferred_messages_have_a_budget_too();
	deferred_bytes_leave_room_to_publish();
	blocks_larger_than_their_bodies_count_in_full();
	bytes_behind_free_slots_are_found();
	what_can_never_fit_is_refused_at_once();
	a_waiting_publisher_says_what_it_needs();
	return 0;
}
