/* Failures, suspects, rejections, and the moves to the dead topic (queue 1) and back to queue 0. */
#include "operations.h"

#define OURS 3u /* the messages 0 to 2, which the process that is killed has taken or convicted */

static const shmq_settings lenient = {.max_attempts = 2};
static const shmq_settings strict = {.max_attempts = 1};
static const shmq_settings slow = {.retry_first = 60 * SECOND, .retry_most = 600 * SECOND};

static void configure(scene *s, const shmq_settings *settings)
{
	EQUAL(CALL(s, s->alive,
	           shmq_queue_configure(s->alive, first_queue(s), s->ledger->queue[0].serial, NULL,
	                                settings, soon())),
	      0);
}

void a_dead_topic(scene *s)
{
	uint32_t topic = s->topic, generation = s->generation, index;
	uint64_t serial;

	EQUAL(shmq_topic_create(s->home, "dead", 0, NULL, soon(), &s->topic, &s->generation), 0);
	index = make_queue(s, s->home, "dead", &serial);
	add_queue(s, index, serial, false);
	s->ledger->dead = (shmq_dead_target){.topic = s->topic, .generation = s->generation};
	s->ledger->carries = true;
	s->topic = topic;
	s->generation = generation;
}

static void lenient_ones(scene *s)
{
	a_dead_topic(s);
	configure(s, &lenient);
}

static void strict_ones(scene *s)
{
	a_dead_topic(s);
	configure(s, &strict);
}

static void slow_ones(scene *s)
{
	a_dead_topic(s);
	configure(s, &slow);
}

/* ---- giving back ---- */

static void requeue_them(scene *s)
{
	EQUAL(WATCHED(shmq_requeue(s->my_consumer, s->m, OURS, 0, NULL, soon())), 0);
}

static void retry_them(scene *s)
{
	EQUAL(WATCHED(shmq_retry(s->my_consumer, s->m, OURS, NULL, soon())), 0);
}

static void release_them(scene *s)
{
	EQUAL(WATCHED(shmq_release(s->my_consumer, s->m, OURS, 0, NULL, soon())), 0);
}

static void reject_them(scene *s)
{
	EQUAL(CALL(s, s->mine, shmq_reject(s->my_consumer, s->m, OURS, 60 * SECOND, NULL, soon())), 0);
}

static void expire_them(scene *s)
{
	uint32_t expired, due;

	EQUAL(WATCHED(shmq_expire(
				  s->mine, first_queue(s),
				  &(shmq_expiry){.now = shmq_now() + 100 * SECOND, .realtime = 0, .limit = 100},
				  soon(), &expired, &due)),
	      0);
	EQUAL(expired, OURS);
}

static void taken_and_strict(scene *s)
{
	strict_ones(s);
	take_alive(s, OURS);
}

/* Look at each of our messages that waits in the queue. */
static void each_of_ours(scene *s, void (*look)(scene *, const shmq_slot_desc *, uint32_t number))
{
	const uint8_t *base = (const void *)queue_of(s, 0);
	const shmq_slot_desc *slots = (const void *)(base + queue_of(s, 0)->slots_at);

	for (uint32_t i = 0; i < queue_of(s, 0)->slots_committed; i++) {
		unsigned state = SHMQ_STATE_OF(slots[i].word);
		uint32_t number = base[queue_of(s, 0)->arena_at + slots[i].body];

		if ((state == SHMQ_REQUEUED || state == SHMQ_DEFERRED) && number < OURS)
			look(s, &slots[i], number);
	}
}

/* Of requeue_them, and of all_died: how many processes took messages before a repair began. */
#define REQUEUER 1u
#define TAKERS_BEFORE 2u

/* Returns true if the message was taken alone since, by a client that died too: it is convicted. */
static bool failed_again(scene *s, const shmq_slot_desc *slot, uint32_t before)
{
	if (!(slot->flags & SHMQ_SLOT_CONVICTED) || slot->failures >> 16 != 2 ||
	    s->ledger->takers <= before)
		return false;
	s->ledger->takers--;
	return true;
}

static void has_failed_once(const shmq_slot_desc *slot, uint32_t number)
{
	if (!(slot->flags & SHMQ_SLOT_FAILED) || slot->failures >> 16 != 1)
		wrong("message %u has failed %u times, not once (flags %u)", number, slot->failures >> 16,
		      slot->flags);
}

static void failed_once(scene *s, const shmq_slot_desc *slot, uint32_t number)
{
	if (!failed_again(s, slot, REQUEUER))
		has_failed_once(slot, number);
}

static void suspect(scene *s, const shmq_slot_desc *slot, uint32_t number)
{
	if (failed_again(s, slot, TAKERS_BEFORE))
		return;
	has_failed_once(slot, number);
	if (!(slot->flags & SHMQ_SLOT_SUSPECT) || slot->flags & SHMQ_SLOT_CONVICTED)
		wrong("message %u is no suspect, or convicted (flags %u)", number, slot->flags);
}

static void convicted(scene *s, const shmq_slot_desc *slot, uint32_t number)
{
	(void)s;
	if (SHMQ_STATE_OF(slot->word) != SHMQ_DEFERRED || !(slot->flags & SHMQ_SLOT_CONVICTED))
		wrong("message %u is not convicted (flags %u)", number, slot->flags);
}

/* Either a requeue or the death counted, and not both. */
static void each_failed_once(scene *s)
{
	each_of_ours(s, failed_once);
}

static void each_is_suspect(scene *s)
{
	each_of_ours(s, suspect);
}

static void each_is_convicted(scene *s)
{
	each_of_ours(s, convicted);
}

/* ---- deaths ---- */

static void come_and_take_all(scene *s)
{
	come(s);
	s->my_consumer = consume(s, s->mine, 0);
	take(s, 4);
}

/* Messages that have failed once, so that one more failure would convict them. */
static void all_died(scene *s)
{
	lenient_ones(s);
	take_alive(s, 4);
	EQUAL(shmq_requeue(s->consumer, s->m, 4, 0, NULL, soon()), 0);
	a_death(s, come_and_take_all, 0);
}

static void come_and_take_one(scene *s)
{
	come(s);
	s->my_consumer = consume(s, s->mine, 0);
	take(s, 1);
}

static void one_died(scene *s)
{
	strict_ones(s);
	a_death(s, come_and_take_one, 0);
}

static void suspects_are_there(scene *s)
{
	all_died(s);
	reap_all(s, s->home);
}

static void come_to_take_a_suspect(scene *s)
{
	come(s);
	s->my_consumer = consume(s, s->mine, 0);
}

static void take_a_suspect(scene *s)
{
	s->ledger->takers++;
	EQUAL(WATCHED(shmq_take(s->my_consumer, s->m, 3, soon(), &s->got)), 0);
	EQUAL(s->got, 1);
}

static void reap_them(scene *s)
{
	reap_all(s, s->mine);
}

/* ---- moves ---- */

static void convict_three(scene *s)
{
	take_alive(s, OURS);
	EQUAL(CALL(s, s->alive, shmq_reject(s->consumer, s->m, OURS, 0, NULL, soon())), 0);
}

static void three_are_convicted(scene *s)
{
	a_dead_topic(s);
	convict_three(s);
}

/* Three that are sealed, beside two that are not and wait. */
static void three_sealed_are_convicted(scene *s)
{
	a_dead_topic(s);
	take_alive(s, 4);
	finish(s, 0, s->consumer, s->m, 4);
	EQUAL(shmq_consumer_close(s->consumer, soon()), 0);
	shmq_consumer_free(s->consumer);
	with_seals(s);
	publish(s, s->alive, s->producer, OURS, SMALL, 0);
	s->ledger->seal = false;
	s->producer = produce(s, s->alive);
	publish(s, s->alive, s->producer, 2, SMALL, 0);
	convict_three(s);
}

/* From now on everybody publishes to the dead topic. */
static void others_publish_there(scene *s)
{
	three_are_convicted(s);
	s->topic = s->ledger->dead.topic;
	s->generation = s->ledger->dead.generation;
	s->ledger->targets = 2;
	s->producer = produce(s, s->alive);
	publish(s, s->alive, s->producer, 2, SMALL, 0);
}

/* Begin to move the convicted messages, and hold both locks: the stores of a move before its commit
 * word. */
static void come_and_begin_to_move(scene *s)
{
	const uint8_t *base = (const void *)queue_of(s, 0);
	shmq_slot_desc *slots = (void *)(uintptr_t)(base + queue_of(s, 0)->slots_at);
	shmq_topic_desc *t = &topics_of(s)[s->ledger->dead.topic];

	come(s);
	pthread_mutex_lock(&t->publish.mutex);
	pthread_mutex_lock(&queue_of(s, 0)->deliver.mutex);
	t->moving = first_queue(s) + 1;
	for (uint32_t i = 0; i < queue_of(s, 0)->slots_committed; i++) {
		if (SHMQ_STATE_OF(slots[i].word) != SHMQ_DEFERRED)
			continue;
		slots[i].previous = SHMQ_DEFERRED;
		slots[i].move = t->committed + 1;
		slots[i].word = SHMQ_WORD(SHMQ_MOVING, s->ledger->dead.topic + 1,
		                          SHMQ_GENERATION_OF(slots[i].word));
	}
}

static void a_mover_died(scene *s)
{
	others_publish_there(s);
	a_death(s, come_and_begin_to_move, 0);
}

static void publish_there(scene *s)
{
	publish(s, s->mine, s->my_producer, 1, SMALL, 0);
}

static void move_them(scene *s)
{
	uint32_t moved;

	EQUAL(CALL(s, s->mine,
	           shmq_dead_move(s->mine, first_queue(s), s->ledger->queue[0].serial, &s->ledger->dead,
	                          &(shmq_dead_wish){.n = 100}, soon(), &moved)),
	      0);
	EQUAL(moved, OURS);
}

static void come_and_reject(scene *s)
{
	come_and_take(s);
	reject_them(s);
}

static void move_what_it_rejected(scene *s)
{
	uint32_t moved;

	EQUAL(CALL(s, s->mine,
	           shmq_dead_move(s->mine, first_queue(s), s->ledger->queue[0].serial, &s->ledger->dead,
	                          &(shmq_dead_wish){.messages = s->m, .n = OURS}, soon(), &moved)),
	      0);
	EQUAL(moved, OURS);
}

static void postpone_them(scene *s)
{
	uint32_t count;

	EQUAL(WATCHED(shmq_dead_postpone(s->mine, first_queue(s), in_an_hour(), 100, soon(), &count)),
	      0);
	EQUAL(count, OURS);
}

static void bury(scene *s)
{
	uint32_t moved;

	EQUAL(CALL(s, s->home,
	           shmq_dead_move(s->home, first_queue(s), s->ledger->queue[0].serial, &s->ledger->dead,
	                          &(shmq_dead_wish){.n = 100}, soon(), &moved)),
	      0);
	EQUAL(moved, OURS);
}

static void three_are_buried(scene *s)
{
	three_are_convicted(s);
	bury(s);
}

static void three_sealed_are_buried(scene *s)
{
	three_sealed_are_convicted(s);
	bury(s);
}

static void come_to_redrive(scene *s)
{
	come(s);
	s->my_consumer = consume(s, s->mine, 1);
	take(s, OURS);
}

static void redrive_them(scene *s)
{
	uint8_t ok[OURS];

	EQUAL(CALL(s, s->mine,
	           shmq_redrive(s->my_consumer, s->m, OURS, first_queue(s), s->ledger->queue[0].serial,
	                        ok, soon())),
	      0);
}

static const operation table[] = {
	{"requeue that counts", 1, lenient_ones, come_and_take, requeue_them, each_failed_once, 0, 1,
	 0},
	{"requeue that convicts", 1, strict_ones, come_and_take, requeue_them, NULL, 0, 1, 0},
	{"retry", 1, slow_ones, come_and_take, retry_them, each_failed_once, 0, 1, 0},
	{"release", 1, strict_ones, come_and_take, release_them, NULL, 0, 1, 0},
	{"reject", 1, a_dead_topic, come_and_take, reject_them, NULL, 0, 1, 0},
	{"expire that convicts", 1, taken_and_strict, come_to_supervise, expire_them, NULL, 1, 1, 0},
	{"take a suspect", 1, suspects_are_there, come_to_take_a_suspect, take_a_suspect, NULL, 0, 1,
	 0},
	{"reap in company", 1, all_died, come_to_supervise, reap_them, each_is_suspect, 1, 1, 0},
	{"reap that convicts", 1, one_died, come_to_supervise, reap_them, each_is_convicted, 1, 1, 0},
	{"move to the dead topic", 1, three_are_convicted, come_to_supervise, move_them, NULL, 1, 1, 0},
	{"move beside publishers", 1, others_publish_there, come_to_supervise, move_them, NULL, 1, 1,
	 0},
	{"publish after a mover died", 1, a_mover_died, come, publish_there, NULL, 1, 1, 0},
	{"move what was rejected", 1, a_dead_topic, come_and_reject, move_what_it_rejected, NULL, 0, 1,
	 0},
	{"postpone the dead", 1, three_are_convicted, come_to_supervise, postpone_them,
	 each_is_convicted, 1, 1, 0},
	{"redrive", 1, three_are_buried, come_to_redrive, redrive_them, NULL, 0, 1, 0},
	{"move sealed ones to the dead topic", 1, three_sealed_are_convicted, come_to_supervise,
	 move_them, NULL, 1, 1, 0},
	{"redrive sealed ones", 1, three_sealed_are_buried, come_to_redrive, redrive_them, NULL, 0, 1,
	 0},
};

const operations dead_operations = {table, sizeof(table) / sizeof(table[0])};
