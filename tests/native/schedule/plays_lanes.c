/* Plays: one consumer of two queues, beside a publisher and a consumer of the second one. Each
 * message of the publisher goes to both queues. */
#include "stage.h"

static shmq_lanes *lanes;
static shmq_consumer *by_queue[2];

/* Actor 1 takes n messages by its lanes, and sleeps until they come. */
static void take_by_lanes(uint32_t n)
{
	int64_t deadline = shmq_now() + 5 * NS_PER_S;
	actor *a = &k->actors[1];
	void *tag;

	while (n) {
		int r = shmq_lanes_take(lanes, a->m, 1, soon(), &a->got, &tag);

		if (!r) {
			uint32_t queue = tag != &by_queue[0], number = body_number(a->m);

			a->c = by_queue[queue];
			a->number[0] = number;
			finish(1, queue, 1);
			n--;
		} else if (r != SHMQ_EMPTY || shmq_lanes_wait(lanes, deadline)) {
			return;
		}
	}
}

static void lanes_one_1(void)
{
	take_by_lanes(1);
}

static void lanes_two_1(void)
{
	take_by_lanes(2);
}

static void lanes_wait_and_close_1(void)
{
	(void)shmq_lanes_wait(lanes, shmq_now() + 5 * NS_PER_S);
	shmq_lanes_close(lanes);
}

static void publish_twice_0(void)
{
	publish(0, 1, 0);
	publish(0, 1, 0);
}

static void wait_second_2(void)
{
	int64_t deadline = shmq_now() + 5 * NS_PER_S;

	while (take(2, 1, 1))
		if (shmq_consumer_wait(k->actors[2].c, deadline))
			return;
	finish(2, 1, 1);
}

static void come_with_lanes(bool strict, uint32_t max_in_flight)
{
	static const uint32_t weights[] = {1, 1};
	actor *a = &k->actors[1];

	come(1, SHMQ_AS_CLIENT);
	schedule_as(1);
	EQUAL(shmq_lanes_open(a->b, strict, false, weights, 2, max_in_flight, &lanes), 0);
	for (uint32_t q = 0; q < 2; q++) {
		by_queue[q] = world_consumer(k->w, a->b, k->queue[q], k->serial[q], max_in_flight);
		EQUAL(shmq_lanes_add(lanes, by_queue[q], q, &by_queue[q]), 0);
	}
	a->c = by_queue[0];
	schedule_as(OUTSIDE);
}

/* The lanes were looked at before: their bits are in the bitmaps, and nobody sleeps. */
static void begin_with_lanes(void)
{
	begin(2);
	come_to_publish(0);
	come_with_lanes(false, 8);
	schedule_as(1);
	CHECK(!shmq_lanes_look(lanes));
	schedule_as(OUTSIDE);
	come_to_take(2, 1);
	k->out_of_order = true;
}

static void begin_with_new_lanes(void)
{
	begin(2);
	come_to_publish(0);
	come_with_lanes(true, 8);
	come_to_take(2, 1);
	k->out_of_order = true;
}

static bool has_ready(uint32_t queue)
{
	shmq_queue_desc *q = desc(queue);

	return q->ready_head != q->ready_tail || q->requeue_head != q->requeue_tail;
}

static bool asleep_with_lanes(uint32_t who)
{
	return who == 1 ? !has_ready(0) && !has_ready(1) : !has_ready(1);
}

/* As PLAY; who has lanes sleeps only if both queues are empty. */
#define LANES_PLAY(name, begin, ...)                                                               \
	{                                                                                              \
		begin,                                                                                     \
		{                                                                                          \
			name, {__VA_ARGS__}, settle, verify, asleep_with_lanes                                 \
		}                                                                                          \
	}

static const play table[] = {
	LANES_PLAY("publish, lanes", begin_with_lanes, publish_one_0, lanes_two_1),
	LANES_PLAY("publish, new lanes", begin_with_new_lanes, publish_one_0, lanes_two_1),
	LANES_PLAY("publish, lanes, wait", begin_with_lanes, publish_one_0, lanes_one_1, wait_second_2),
	LANES_PLAY("publish, new lanes, wait", begin_with_new_lanes, publish_one_0, lanes_one_1,
	           wait_second_2),
	LANES_PLAY("publish, publish, lanes, wait", begin_with_lanes, publish_twice_0, lanes_one_1,
	           wait_second_2),
	LANES_PLAY("publish, lanes close, wait", begin_with_lanes, publish_one_0,
	           lanes_wait_and_close_1, wait_second_2),
};

const plays lanes_plays = {table, sizeof(table) / sizeof(table[0])};
