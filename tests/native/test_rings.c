/* The supervisor's doorbell: a process with work for it marks the queue and rings; no other does.
 * So it sleeps while nothing happens, with any number of queues. */
#include "one_queue.h"

static void publish(stage *x, uint32_t n, int64_t due)
{
	shmq_body body = {"x", 1};
	uint64_t id;

	while (n--)
		EQUAL(MAPPED(x->w, x->b, shmq_publish(x->p, &body, 1, due, soon(), &id)), 0);
}

static void take_and_finish(stage *x, uint32_t n)
{
	shmq_message m;
	uint32_t got;

	while (n--) {
		EQUAL(shmq_take(x->c, &m, 1, soon(), &got), 0);
		EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	}
}

/* The reasons for which it was rung since the last look. */
static uint32_t rung(stage *x)
{
	uint32_t why;

	EQUAL(shmq_supervisor_wait(x->s, 0, &why), 0);
	return why;
}

/* Whether the spiller was rung for, to look at `queue` and no other. */
static bool asks(stage *x, uint32_t queue)
{
	uint32_t queues[SHMQ_QUEUES], n = shmq_spiller_pending(x->s, queues, SHMQ_QUEUES);
	bool ring = rung(x) & SHMQ_RING_SPILLER;

	CHECK(n <= 1 && (n ? ring && queues[0] == queue : true));
	return n;
}

/* All that is READY to a disk that nobody reads. */
static void spill(stage *x, uint8_t *disk, uint64_t *end)
{
	uint32_t slots[400], lengths[400];
	uint64_t positions[400], at = 0;
	shmq_spill s = {.slots = slots, .lengths = lengths, .positions = positions};

	EQUAL(shmq_spill_begin(x->s, x->queue, SHMQ_SPILL_READY, 400, 1 << 20, soon(), &s), 0);
	EQUAL(shmq_spill_encode(x->s, &s, disk), 0);
	for (uint32_t i = 0; i < s.count; at += lengths[i++])
		positions[i] = at;
	EQUAL(shmq_spill_end(x->s, &s, at, true, soon()), 0);
	*end = at;
}

static void a_publisher_asks_once_at_the_high_water_mark(void)
{
	stage x = stage_open(small_limits(400, 400), "c");

	rung(&x);
	asks(&x, x.queue);
	publish(&x, 300, 0);
	CHECK(!asks(&x, x.queue));
	publish(&x, 1, 0);
	CHECK(asks(&x, x.queue));
	publish(&x, 99, 0);
	CHECK(!asks(&x, x.queue)); /* it was told */
	take_and_finish(&x, 200);
	publish(&x, 200, 0);
	CHECK(asks(&x, x.queue));
	stage_close(x);
}

static void an_ephemeral_channel_asks_for_nothing(void)
{
	stage x = stage_open(small_limits(400, 400), "c#ephemeral");

	asks(&x, x.queue);
	publish(&x, 500, 0);
	EQUAL(ld(&x.q->dropped), 100);
	CHECK(!asks(&x, x.queue));
	stage_close(x);
}

static void with_no_message_to_be_in_memory_the_first_asks(void)
{
	stage x = stage_open(small_limits(0, 400), "c");

	asks(&x, x.queue);
	publish(&x, 1, 0);
	CHECK(asks(&x, x.queue));
	stage_close(x);
}

static void a_consumer_asks_below_the_low_water_mark(void)
{
	stage x = stage_open(small_limits(400, 400), "c");
	uint8_t *disk = malloc(1 << 20);
	uint64_t end, used;
	uint32_t taken;
	shmq_message m;

	publish(&x, 300, 0);
	take_and_finish(&x, 100);
	asks(&x, x.queue);
	spill(&x, disk, &end);
	publish(&x, 200, 0);
	CHECK(!asks(&x, x.queue));
	publish(&x, 1, 0); /* new messages wait for those on disk: the mark is half now */
	CHECK(asks(&x, x.queue));
	EQUAL(shmq_restore(x.s, x.queue,
	                   &(shmq_records){.data = disk, .length = end - 31, .next_position = end - 31},
	                   soon(), &taken, &used),
	      0);
	EQUAL(taken, 199);
	EQUAL(x.q->low_water, 100);
	take_and_finish(&x, 99);
	CHECK(!asks(&x, x.queue));
	take_and_finish(&x, 1);
	CHECK(asks(&x, x.queue));
	take_and_finish(&x, 99);
	asks(&x, x.queue);
	EQUAL(shmq_take(x.c, &m, 1, soon(), &taken), SHMQ_EMPTY);
	CHECK(asks(&x, x.queue)); /* waiting publishers ask again */
	stage_close(x);
	free(disk);
}

static void deferred_messages_ask_beyond_half_of_what_may_be_held(void)
{
	stage x = stage_open(small_limits(400, 400), "c");
	int64_t due = shmq_realtime() + 3000 * NS_PER_S;
	uint32_t got;
	shmq_message m;

	asks(&x, x.queue);
	publish(&x, 200, due);
	CHECK(!asks(&x, x.queue));
	publish(&x, 1, due);
	CHECK(asks(&x, x.queue));
	publish(&x, 1, 0);
	EQUAL(shmq_take(x.c, &m, 1, soon(), &got), 0);
	asks(&x, x.queue);
	EQUAL(shmq_requeue(x.c, &m, 1, NS_PER_S, NULL, soon()), 0);
	CHECK(asks(&x, x.queue));
	stage_close(x);
}

static void a_backlog_asks_when_it_can_move(void)
{
	stage x = stage_open(small_limits(400, 400), "c");
	uint64_t serial;
	uint32_t backlog = world_queue(x.w, x.topic, NULL, &serial), moved;

	publish(&x, 1, 0);
	take_and_finish(&x, 1);
	EQUAL(MAPPED(x.w, x.b, shmq_topic_pause(x.b, x.topic, x.generation, true, soon())), 0);
	asks(&x, backlog);
	publish(&x, 10, 0);
	CHECK(!asks(&x, backlog));
	EQUAL(shmq_topic_pause(x.b, x.topic, x.generation, false, soon()), 0);
	CHECK(asks(&x, backlog));
	publish(&x, 10, 0); /* after the others */
	CHECK(asks(&x, backlog));
	EQUAL(MAPPED(x.w, x.s, shmq_pump(x.s, x.topic, x.generation, 100, soon(), &moved)), 0);
	EQUAL(moved, 20);
	take_and_finish(&x, 20);
	publish(&x, 1, 0);
	CHECK(!asks(&x, backlog));
	stage_close(x);
}

static void what_a_dead_client_may_have_forgotten_to_ring_for_is_looked_at(void)
{
	stage x = stage_open(small_limits(400, 400), "c");
	uint64_t dropped;

	EQUAL(shmq_queue_empty(x.b, x.queue, x.serial, soon(), &dropped), 0);
	CHECK(asks(&x, x.queue));
	rung(&x);
	EQUAL(shmq_broker_detach(x.b, soon()), 0); /* as the reaper does it */
	EQUAL(rung(&x) & ~SHMQ_RING_REQUEST,
	      SHMQ_RING_SPILLER | SHMQ_RING_LEFT | SHMQ_RING_CHANGED | SHMQ_RING_DEADLINE);
	CHECK(shmq_spiller_pending(x.s, (uint32_t[64]){0}, 64) == 1);
	shmq_consumer_free(x.c);
	shmq_producer_close(x.p);
	shmq_broker_close(x.b);
	world_stop(x.w);
}

static void what_does_not_fit_is_left_for_the_next_look(void)
{
	stage x = stage_open(small_limits(400, 400), "c");
	uint32_t queues[64];

	asks(&x, x.queue);
	shmq_spiller_request(x.s, 3);
	shmq_spiller_request(x.s, 700);
	shmq_spiller_request(x.s, SHMQ_QUEUES);
	EQUAL(shmq_spiller_pending(x.s, queues, 64), 1);
	EQUAL(queues[0], 3);
	EQUAL(shmq_spiller_pending(x.s, queues, 64), 1);
	EQUAL(queues[0], 700);
	EQUAL(shmq_spiller_pending(x.s, queues, 64), 0);
	stage_close(x);
}

static void only_what_is_earlier_wakes_the_scanner(void)
{
	stage x = stage_open(small_limits(400, 400), "c");
	int64_t now = shmq_now(), realtime = shmq_realtime();
	uint32_t got, expired, due;
	shmq_message m;

	publish(&x, 3, 0);
	rung(&x);
	shmq_scan_at(x.s, now + 50 * NS_PER_S, realtime + 50 * NS_PER_S);
	EQUAL(shmq_take(x.c, &m, 1, soon(), &got), 0); /* times out after 60 s */
	EQUAL(rung(&x), 0);
	EQUAL(shmq_requeue(x.c, &m, 1, 55 * NS_PER_S, NULL, soon()), 0);
	EQUAL(rung(&x), 0);
	publish(&x, 1, realtime + 10 * NS_PER_S);
	EQUAL(rung(&x), SHMQ_RING_DEADLINE);
	publish(&x, 1, realtime + 11 * NS_PER_S);
	EQUAL(rung(&x), 0);
	EQUAL(shmq_expire(x.s, x.queue, &(shmq_expiry){.now = now, .realtime = realtime, .limit = 10},
	                  soon(), &expired, &due),
	      0);
	shmq_scan_at(x.s, now + 70 * NS_PER_S, realtime + 5 * NS_PER_S);
	EQUAL(shmq_take(x.c, &m, 1, soon(), &got), 0);
	EQUAL(rung(&x), SHMQ_RING_DEADLINE);
	EQUAL(shmq_take(x.c, &m, 1, soon(), &got), 0); /* later than the one before */
	EQUAL(rung(&x), 0);
	stage_close(x);
}

static void names_and_pauses_are_told(void)
{
	stage x = stage_open(small_limits(400, 400), "c");
	uint32_t generation;

	CHECK(rung(&x) & SHMQ_RING_CHANGED);
	EQUAL(shmq_channel_pause(x.b, x.queue, x.serial, true, soon()), 0);
	EQUAL(rung(&x), SHMQ_RING_CHANGED);
	(void)world_topic(x.w, "u", &generation);
	EQUAL(rung(&x), SHMQ_RING_CHANGED);
	stage_close(x);
}

int main(void)
{
	a_publisher_asks_once_at_the_high_water_mark();
	an_ephemeral_channel_asks_for_nothing();
	with_no_message_to_be_in_memory_the_first_asks();
	a_consumer_asks_below_the_low_water_mark();
	deferred_messages_ask_beyond_half_of_what_may_be_held();
	a_backlog_asks_when_it_can_move();
	what_a_dead_client_may_have_forgotten_to_ring_for_is_looked_at();
	what_does_not_fit_is_left_for_the_next_look();
	only_what_is_earlier_wakes_the_scanner();
	names_and_pauses_are_told();
	return 0;
}
