/* One topic, several channels: all or nothing, backlogs, pauses, moving. */
#include "harness.h"

typedef struct stage {
	world *w;
	shmq_broker *b;
	uint32_t topic, generation, queue[4], n;
	uint64_t serial[4];
	shmq_producer *p;
	shmq_consumer *c[4];
} stage;

static void channel(stage *x, const char *name)
{
	x->queue[x->n] = world_queue(x->w, x->topic, name, &x->serial[x->n]);
	x->c[x->n] = world_consumer(x->w, x->b, x->queue[x->n], x->serial[x->n], 100000);
	x->n++;
}

static stage setup(void)
{
	stage x = {.w = world_start(small_limits(300, 300))};

	x.topic = world_topic(x.w, "t", &x.generation);
	x.b = world_attach(x.w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(x.b, x.topic, x.generation, &x.p), 0);
	return x;
}

static void teardown(stage x)
{
	SOUND(x.w);
	for (uint32_t i = 0; i < x.n; i++) {
		EQUAL(shmq_consumer_close(x.c[i], soon()), 0);
		shmq_consumer_free(x.c[i]);
	}
	shmq_producer_close(x.p);
	EQUAL(MAPPED(x.w, x.b, shmq_broker_detach(x.b, soon())), 0);
	shmq_broker_close(x.b);
	world_stop(x.w);
}

static int publish(stage *x, uint32_t first, uint32_t n, int64_t due)
{
	char text[64][16];
	shmq_body bodies[64];
	uint64_t id;

	for (uint32_t i = 0; i < n; i++) {
		snprintf(text[i], sizeof(text[i]), "%u", first + i);
		bodies[i] = (shmq_body){text[i], strlen(text[i])};
	}
	return MAPPED(x->w, x->b, shmq_publish(x->p, bodies, n, due, soon(), &id));
}

/* Takes and finishes what is there: it must be first, first + 1, ... */
static uint32_t expect(stage *x, uint32_t k, uint32_t first)
{
	shmq_message m[64];
	uint32_t got, n = 0;
	char text[16];

	while (!shmq_take(x->c[k], m, 64, soon(), &got)) {
		for (uint32_t i = 0; i < got; i++) {
			snprintf(text, sizeof(text), "%u", first + n++);
			CHECK(body_is(&m[i], text));
		}
		EQUAL(shmq_finish(x->c[k], m, got, NULL, soon()), 0);
	}
	return n;
}

static void every_channel_gets_every_message_with_one_id(void)
{
	stage x = setup();
	shmq_message m[3];
	uint32_t got;

	for (const char *name = "a\0b\0c"; x.n < 3; name += 2)
		channel(&x, name);
	EQUAL(publish(&x, 0, 5, 0), 0);
	for (uint32_t k = 0; k < 3; k++)
		EQUAL(shmq_take(x.c[k], &m[k], 1, soon(), &got), 0);
	EQUAL(m[0].id, m[1].id);
	EQUAL(m[1].id, m[2].id);
	EQUAL(m[0].timestamp, m[2].timestamp);
	EQUAL(shmq_finish(x.c[0], m, 1, NULL, soon()), 0); /* its own copy: the others have theirs */
	EQUAL(shmq_finish(x.c[1], &m[1], 1, NULL, soon()), 0);
	EQUAL(shmq_finish(x.c[2], &m[2], 1, NULL, soon()), 0);
	for (uint32_t k = 0; k < 3; k++)
		EQUAL(expect(&x, k, 1), 4);
	teardown(x);
}

static void a_batch_is_in_all_channels_or_in_none(void)
{
	stage x = setup();
	uint32_t n = 0;

	channel(&x, "a");
	channel(&x, "slow");
	channel(&x, "c");
	for (;; n += 7) {
		int r = publish(&x, n, 7, 0);

		EQUAL(expect(&x, 0, n), r ? 0 : 7);
		EQUAL(expect(&x, 2, n), r ? 0 : 7);
		if (r == SHMQ_FULL)
			break;
		EQUAL(r, 0);
	}
	EQUAL(n, 300 / 7 * 7);
	EQUAL(publish(&x, n, 300 % 7 + 1, 0), SHMQ_FULL);
	EQUAL(publish(&x, n, 300 % 7, 0), 0); /* what fits is taken */
	EQUAL(expect(&x, 1, 0), 300);
	EQUAL(publish(&x, 1000, 7, 0), 0);
	teardown(x);
}

static void a_full_ephemeral_channel_is_skipped_and_counted(void)
{
	stage x = setup();
	shmq_queue_desc *q;

	channel(&x, "a");
	channel(&x, "b#ephemeral");
	q = world_view(x.w, x.queue[1])->q;
	for (uint32_t n = 0; n < 300; n += 10)
		EQUAL(publish(&x, n, 10, 0), 0);
	EQUAL(expect(&x, 0, 0), 300);
	EQUAL(ld(&q->dropped), 0);
	EQUAL(publish(&x, 300, 10, 0), 0);
	EQUAL(ld(&q->dropped), 10);
	EQUAL(expect(&x, 0, 300), 10);
	EQUAL(expect(&x, 1, 0), 300);
	EQUAL(publish(&x, 310, 1, 0), 0);
	EQUAL(expect(&x, 1, 310), 1);
	EQUAL(expect(&x, 0, 310), 1);
	teardown(x);
}

static void a_topic_of_only_full_ephemeral_channels_takes_publishes(void)
{
	stage x = setup();
	uint8_t *body = malloc(100000);
	shmq_body large = {body, 100000};
	uint64_t id;

	channel(&x, "a#ephemeral");
	for (uint32_t n = 0; n < 300; n += 10)
		EQUAL(publish(&x, n, 10, 0), 0);
	EQUAL(publish(&x, 300, 1, 0), 0);
	memset(body, 'L', 100000);
	EQUAL(MAPPED(x.w, x.b, shmq_publish(x.p, &large, 1, 0, soon(), &id)), 0); /* no slot to lend */
	EQUAL(ld(&world_view(x.w, x.queue[0])->q->dropped), 2);
	free(body);
	teardown(x);
}

static void a_new_channel_gets_what_comes_after_it(void)
{
	stage x = setup();

	channel(&x, "a");
	EQUAL(publish(&x, 0, 3, 0), 0);
	channel(&x, "b");
	EQUAL(publish(&x, 3, 3, 0), 0);
	EQUAL(expect(&x, 0, 0), 6);
	EQUAL(expect(&x, 1, 3), 3);
	teardown(x);
}

static void the_first_channel_takes_the_backlog_over(void)
{
	stage x = setup();
	uint32_t queue;
	uint64_t serial;

	EQUAL(publish(&x, 0, 3, 0), SHMQ_NEED_BACKLOG);
	(void)world_queue(x.w, x.topic, NULL, &serial);
	EQUAL(publish(&x, 0, 3, 0), 0);
	EQUAL(shmq_queue_take_over(x.w->supervisor, x.topic, "a", NULL, soon(), &queue, &serial), 0);
	x.queue[0] = queue;
	x.c[0] = world_consumer(x.w, x.b, queue, serial, 1000);
	x.n = 1;
	EQUAL(publish(&x, 3, 3, 0), 0);
	channel(&x, "b");
	EQUAL(publish(&x, 6, 3, 0), 0);
	EQUAL(expect(&x, 0, 0), 9);
	EQUAL(expect(&x, 1, 6), 3);
	teardown(x);
}

/* Its files still bear the backlog's name: it may not spill before they are renamed. */
static void a_taken_over_queue_waits_for_its_files_name(void)
{
	stage x = setup();
	uint32_t queue, slots[4], lengths[4];
	uint64_t serial, positions[4] = {0};
	shmq_spill s = {.slots = slots, .lengths = lengths, .positions = positions};

	(void)world_queue(x.w, x.topic, NULL, &serial);
	EQUAL(publish(&x, 0, 3, 0), 0);
	EQUAL(shmq_queue_take_over(x.w->supervisor, x.topic, "a", NULL, soon(), &queue, &serial), 0);
	EQUAL(shmq_spill_begin(x.w->supervisor, queue, SHMQ_SPILL_READY, 4, 1000, soon(), &s),
	      SHMQ_EMPTY);
	EQUAL(shmq_queue_renamed(x.w->supervisor, queue, "t:a", soon()), 0);
	EQUAL(shmq_spill_begin(x.w->supervisor, queue, SHMQ_SPILL_READY, 4, 1000, soon(), &s), 0);
	EQUAL(s.count, 3);
	EQUAL(shmq_spill_end(x.w->supervisor, &s, 0, false, soon()), 0);
	teardown(x);
}

static void a_paused_topic_keeps_in_its_backlog_what_comes(void)
{
	stage x = setup();
	shmq_message m;
	uint32_t moved, got;
	uint64_t serial;

	channel(&x, "a");
	channel(&x, "b");
	EQUAL(publish(&x, 0, 2, 0), 0);
	EQUAL(shmq_topic_pause(x.b, x.topic, x.generation, true, soon()), 0);
	EQUAL(publish(&x, 2, 2, 0), SHMQ_NEED_BACKLOG);
	(void)world_queue(x.w, x.topic, NULL, &serial);
	for (uint32_t n = 2; n < 50; n += 2)
		EQUAL(publish(&x, n, 2, 0), 0);
	EQUAL(expect(&x, 0, 0), 2);
	EQUAL(MAPPED(x.w, x.w->supervisor,
	             shmq_pump(x.w->supervisor, x.topic, x.generation, 100, soon(), &moved)),
	      SHMQ_EMPTY);
	EQUAL(shmq_topic_pause(x.b, x.topic, x.generation, false, soon()), 0);
	/* While the backlog is not empty the topic goes on publishing into it. */
	EQUAL(publish(&x, 50, 2, 0), 0);
	EQUAL(shmq_take(x.c[0], &m, 1, soon(), &got), SHMQ_EMPTY);
	EQUAL(MAPPED(x.w, x.w->supervisor,
	             shmq_pump(x.w->supervisor, x.topic, x.generation, 11, soon(), &moved)),
	      0);
	EQUAL(moved, 11);
	SOUND(x.w);
	EQUAL(expect(&x, 0, 2), 11);
	EQUAL(publish(&x, 52, 2, 0), 0);
	EQUAL(shmq_pump(x.w->supervisor, x.topic, x.generation, 1000, soon(), &moved), 0);
	EQUAL(moved, 41);
	EQUAL(shmq_pump(x.w->supervisor, x.topic, x.generation, 1000, soon(), &moved), SHMQ_EMPTY);
	EQUAL(publish(&x, 54, 2, 0), 0); /* to the channels again */
	EQUAL(expect(&x, 0, 13), 43);
	EQUAL(expect(&x, 1, 0), 56);
	teardown(x);
}

static void a_pump_stops_at_a_full_channel_and_goes_on(void)
{
	stage x = setup();
	uint32_t moved, n = 0, all = 0;
	uint64_t serial;

	channel(&x, "a");
	channel(&x, "slow");
	EQUAL(publish(&x, 0, 50, 0), 0);
	EQUAL(expect(&x, 0, 0), 50);
	EQUAL(shmq_topic_pause(x.b, x.topic, x.generation, true, soon()), 0);
	(void)world_queue(x.w, x.topic, NULL, &serial);
	for (n = 50; n < 350; n += 50)
		EQUAL(publish(&x, n, 50, 0), 0);
	EQUAL(publish(&x, n, 1, 0), SHMQ_FULL);
	EQUAL(shmq_topic_pause(x.b, x.topic, x.generation, false, soon()), 0);
	EQUAL(MAPPED(x.w, x.w->supervisor,
	             shmq_pump(x.w->supervisor, x.topic, x.generation, 1000, soon(), &moved)),
	      0);
	EQUAL(moved, 250);
	EQUAL(shmq_pump(x.w->supervisor, x.topic, x.generation, 1000, soon(), &moved), SHMQ_FULL);
	EQUAL(moved, 0);
	EQUAL(expect(&x, 0, 50), 250);
	all = expect(&x, 1, 0);
	EQUAL(all, 300);
	EQUAL(shmq_pump(x.w->supervisor, x.topic, x.generation, 1000, soon(), &moved), 0);
	EQUAL(moved, 50);
	EQUAL(expect(&x, 0, 300), 50);
	EQUAL(expect(&x, 1, 300), 50);
	teardown(x);
}

static void a_pumped_message_keeps_its_id_and_its_due_time(void)
{
	stage x = setup();
	int64_t due = shmq_realtime() + 3600 * NS_PER_S;
	uint32_t moved, queue, expired, came, got;
	shmq_message m[2];
	shmq_body body = {"later", 5};
	uint64_t serial, id;

	queue = world_queue(x.w, x.topic, NULL, &serial);
	EQUAL(MAPPED(x.w, x.b, shmq_publish(x.p, &body, 1, due, soon(), &id)), 0);
	EQUAL(shmq_topic_pause(x.b, x.topic, x.generation, true, soon()), 0);
	channel(&x, "a");
	channel(&x, "b");
	EQUAL(shmq_topic_pause(x.b, x.topic, x.generation, false, soon()), 0);
	EQUAL(MAPPED(x.w, x.w->supervisor,
	             shmq_pump(x.w->supervisor, x.topic, x.generation, 1000, soon(), &moved)),
	      0);
	EQUAL(moved, 1);
	CHECK(queue_is_empty(world_view(x.w, queue)->q));
	for (uint32_t k = 0; k < 2; k++) {
		EQUAL(ld(&x.b->next_due[x.queue[k]]), due);
		EQUAL(shmq_expire(x.w->supervisor, x.queue[k],
		                  &(shmq_expiry){.realtime = due - 1, .limit = 10}, soon(), &expired,
		                  &came),
		      0);
		EQUAL(came, 0);
		EQUAL(shmq_expire(x.w->supervisor, x.queue[k], &(shmq_expiry){.realtime = due, .limit = 10},
		                  soon(), &expired, &came),
		      0);
		EQUAL(came, 1);
		EQUAL(shmq_take(x.c[k], &m[k], 1, soon(), &got), 0);
		EQUAL(m[k].id, id);
		EQUAL(m[k].attempts, 1);
	}
	teardown(x);
}

static void a_paused_channel_gives_nothing_and_keeps_everything(void)
{
	stage x = setup();
	shmq_message m;
	uint32_t got;

	channel(&x, "a");
	channel(&x, "b");
	EQUAL(shmq_channel_pause(x.b, x.queue[0], x.serial[0], true, soon()), 0);
	EQUAL(publish(&x, 0, 5, 0), 0);
	EQUAL(shmq_take(x.c[0], &m, 1, soon(), &got), SHMQ_EMPTY);
	EQUAL(expect(&x, 1, 0), 5);
	EQUAL(shmq_channel_pause(x.b, x.queue[0], x.serial[0], false, soon()), 0);
	EQUAL(expect(&x, 0, 0), 5);
	teardown(x);
}

int main(void)
{
	every_channel_gets_every_message_with_one_id();
	a_batch_is_in_all_channels_or_in_none();
	a_full_ephemeral_channel_is_skipped_and_counted();
	a_topic_of_only_full_ephemeral_channels_takes_publishes();
	a_new_channel_gets_what_comes_after_it();
	the_first_channel_takes_the_backlog_over();
	a_taken_over_queue_waits_for_its_files_name();
	a_paused_topic_keeps_in_its_backlog_what_comes();
	a_pump_stops_at_a_full_channel_and_goes_on();
	a_pumped_message_keeps_its_id_and_its_due_time();
	a_paused_channel_gives_nothing_and_keeps_everything();
	return 0;
}
