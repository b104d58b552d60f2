/*
 * Plays: messages on their way from queue 0 to queue 1, that of another topic, and back. The early
 * messages are convicted; actor 0 publishes to the other topic. Each message is in one of the two
 * queues, once.
 */
#include "stage.h"

static shmq_dead_target dead; /* the same in each run */

static uint32_t move_some(shmq_broker *b)
{
	uint32_t moved, expired, due;

	EQUAL(shmq_expire(b, k->queue[0],
	                  &(shmq_expiry){.now = 0, .realtime = INT64_MAX, .limit = 1000}, soon(),
	                  &expired, &due),
	      0);
	(void)MAPPED(k->w, b,
	             shmq_dead_move(b, k->queue[0], k->serial[0], &dead, &(shmq_dead_wish){.n = 10},
	                            soon(), &moved));
	return moved;
}

/* ---- acts ---- */

static void publish_there_0(void)
{
	publish(0, 1, 0);
}

static void publish_twice_there_0(void)
{
	publish(0, 1, 0);
	publish(0, 1, 0);
}

static void take_there_1(void)
{
	take(1, 1, 1);
	finish(1, 1, 1);
}

static void reject_1(void)
{
	actor *a = &k->actors[1];

	(void)MAPPED(k->w, a->b, shmq_reject(a->c, a->m, a->got, 0, NULL, soon()));
}

static void redrive_1(void)
{
	actor *a = &k->actors[1];
	uint8_t ok[16];

	(void)MAPPED(k->w, a->b,
	             shmq_redrive(a->c, a->m, a->got, k->queue[0], k->serial[0], ok, soon()));
}

static void move_3(void)
{
	(void)move_some(k->actors[3].b);
}

static void rebuild_source_2(void)
{
	EQUAL(shmq_rebuild(k->actors[2].b, k->queue[0], soon()), 0);
}

/* ---- beginnings ---- */

static void begin_two_topics(void)
{
	uint32_t topic, generation;

	begin(1);
	topic = k->topic;
	generation = k->generation;
	k->topic = dead.topic = world_topic(k->w, "dead", &dead.generation);
	k->generation = dead.generation;
	make_queue("dead");
	come_to_publish(0);
	k->topic = topic;
	k->generation = generation;
	k->out_of_order = true;
}

static void reject_early(uint32_t n)
{
	shmq_broker *b = k->w->supervisor;
	shmq_consumer *c = world_consumer(k->w, b, k->queue[0], k->serial[0], 8);
	shmq_message m[8];
	uint32_t got;

	publish(EARLY, n, 0);
	EQUAL(shmq_take(c, m, n, soon(), &got), 0);
	EQUAL(shmq_reject(c, m, got, 0, NULL, soon()), 0);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
}

static void begin_convicted(void)
{
	begin_two_topics();
	reject_early(2);
	come_to_take(1, 1);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}

static void begin_to_reject(void)
{
	begin_two_topics();
	publish(EARLY, 2, 0);
	come_to_take(1, 0);
	schedule_as(1);
	take(1, 0, 2);
	schedule_as(OUTSIDE);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}

static void begin_to_redrive(void)
{
	begin_two_topics();
	reject_early(2);
	EQUAL(move_some(k->w->supervisor), 2);
	come_to_take(1, 1);
	schedule_as(1);
	take(1, 1, 2);
	schedule_as(OUTSIDE);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}

/* ---- the end ---- */

static void locks_are_free(void)
{
	shmq_broker *b = k->w->supervisor;

	for (uint32_t t = 0; t < 2; t++) {
		EQUAL(MAPPED(k->w, b, topic_lock(b, &b->topics[t ? dead.topic : k->topic], soon())), 0);
		EQUAL(b->topics[t ? dead.topic : k->topic].moving, 0);
		topic_unlock(&b->topics[t ? dead.topic : k->topic]);
	}
	for (uint32_t q = 0; q < k->n; q++) {
		EQUAL(MAPPED(k->w, b, queue_lock(b, world_view(k->w, k->queue[q]), soon())), 0);
		queue_unlock(world_view(k->w, k->queue[q]));
	}
}

static void queues_are_sound(void)
{
	for (uint32_t q = 0; q < k->n; q++) {
		const char *wrong = checker_queue(k->w->supervisor->base,
		                                  world_view(k->w, k->queue[q])->base);

		if (*wrong)
			schedule_fail("queue %u: %s", q, wrong);
	}
}

static void drain_there(uint32_t q, uint8_t *seen)
{
	shmq_consumer *c = world_consumer(k->w, k->w->supervisor, k->queue[q], k->serial[q], 100);
	shmq_message m;
	uint32_t got;

	while (!shmq_take(c, &m, 1, soon(), &got)) {
		uint32_t number = body_number(&m);

		if (seen[number]++)
			schedule_fail("queue %u: message %u comes twice", q, number);
		if (number / EACH == 0 && q == 0)
			schedule_fail("message %u of the other topic is in queue 0", number);
		EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
	}
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	EQUAL(ring_count(&desc(q)->free_head, &desc(q)->free_tail), desc(q)->slots_committed);
}

static void verify_dead(void)
{
	uint8_t seen[MESSAGES] = {0};

	locks_are_free();
	queues_are_sound();
	for (uint32_t i = 0; i < ACTORS; i++) {
		if (!k->actors[i].b || schedule_is_dead(i))
			continue;
		schedule_as(i);
		EQUAL(MAPPED(k->w, k->actors[i].b, shmq_broker_detach(k->actors[i].b, soon())), 0);
		schedule_as(OUTSIDE);
	}
	while (move_some(k->w->supervisor))
		;
	queues_are_sound();
	for (uint32_t q = 0; q < k->n; q++)
		drain_there(q, seen);
	for (uint32_t i = 0; i < MESSAGES; i++) {
		bool finished = k->finished[0][i] == TAKEN || k->finished[1][i] == TAKEN;
		bool maybe = k->finished[0][i] != OPEN || k->finished[1][i] != OPEN;

		if (seen[i] && finished)
			schedule_fail("message %u comes back after its finish", i);
		if (k->published[i] == RETURNED && !seen[i] && !maybe)
			schedule_fail("message %u is lost", i);
	}
}

#define PLAY_OF_TWO(name, begin, ...)                                                              \
	{                                                                                              \
		begin,                                                                                     \
		{                                                                                          \
			name, {__VA_ARGS__}, settle, verify_dead, asleep                                       \
		}                                                                                          \
	}

static const play table[] = {
	/* the actors: 0 publishes to the dead topic, 1 consumes, 2 repairs, 3 supervises */
	PLAY_OF_TWO("move, publish there", begin_convicted, publish_there_0, NULL, NULL, move_3),
	PLAY_OF_TWO("move, publish there twice", begin_convicted, publish_twice_there_0, NULL, NULL,
	            move_3),
	PLAY_OF_TWO("move, take there", begin_convicted, NULL, take_there_1, NULL, move_3),
	PLAY_OF_TWO("move, rebuild", begin_convicted, NULL, NULL, rebuild_source_2, move_3),
	PLAY_OF_TWO("move, publish there, rebuild", begin_convicted, publish_there_0, NULL,
	            rebuild_source_2, move_3),
	PLAY_OF_TWO("reject, move", begin_to_reject, NULL, reject_1, NULL, move_3),
	PLAY_OF_TWO("redrive, publish there", begin_to_redrive, publish_there_0, redrive_1, NULL, NULL),
	PLAY_OF_TWO("redrive, rebuild", begin_to_redrive, NULL, redrive_1, rebuild_source_2, NULL),
};

const plays dead_plays = {table, sizeof(table) / sizeof(table[0])};
