/*
 * The methods of _native.Broker that only the supervisor calls. None waits with the GIL held.
 *
 * Most are one call of the core each: TELL_METHOD, NONE_METHOD and COUNT_METHOD define those. A
 * call by BROKER_TRY raises Busy if a lock stays held; the supervisor's loops repeat it later.
 */
#include "types.h"

/* ---- the supervisor itself ------------------------------------------------------------------ */

NONE_METHOD(set_data_path, (TEXT, path), BROKER_CALL, shmq_data_path_set(self->handle, path),
            "say where the files are")
TELL_METHOD(disk_trouble, (U32, error), shmq_disk_trouble_set(self->handle, (int)error),
            "say how the disk is")
TELL_METHOD(spiller_request, (U32, queue), shmq_spiller_request(self->handle, queue),
            "have the spiller look")
TELL_METHOD(scan_at, (I64, deadline)(I64, due), shmq_scan_at(self->handle, deadline, due),
            "say when it scans")
TELL_METHOD(names_written, (U64, replaced)(U64, written),
            shmq_names_written(self->handle, replaced, written), "note the metadata's time")
TELL_METHOD(stopping, , shmq_supervisor_stopping(self->handle), "stop the instance")
TELL_METHOD(close_directory, , shmq_directory_close(self->handle), "close the directory")
METHOD(broker, answer, (U32, ticket)(INT, status), (TEXT_OR_NONE, why, NULL))
{
	if (!broker_usable(self, "answer a request"))
		return NULL;
	shmq_request_answer(self->handle, ticket, status, why);
	Py_RETURN_NONE;
}

static PyObject *supervise(broker_object *self, const shmq_limits *limits)
{
	int status;

	BROKER_CALL(self, status, shmq_supervise(self->handle, limits, until));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "become the supervisor");
	Py_RETURN_NONE;
}

PyObject *broker_supervise(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	shmq_limits limits = {0};

	if (limits_parse("supervise", args, nargs, kwnames, &limits) < 0)
		return NULL;
	return GUARDED(supervise((broker_object *)self, &limits));
}

METHOD(broker, supervisor_wait, (I64, deadline), )
{
	uint32_t why = 0;
	int status;

	do {
		if (!broker_usable(self, "wait for work"))
			return NULL;
		CORE_WAIT(self, status, deadline, WAIT_SLICE_NS,
		          shmq_supervisor_wait(self->handle, until, &why));
		if (status != SHMQ_OK && status != SHMQ_TIMEOUT && status != SHMQ_INTERRUPTED)
			return raise_status(self->state, status, NULL, "wait for work");
		if (PyErr_CheckSignals() < 0)
			return NULL;
	} while (!why && status != SHMQ_INTERRUPTED && shmq_now() < deadline);
	return PyLong_FromUnsignedLong(why);
}

METHOD(broker, spiller_pending, , )
{
	uint32_t most = constant_of("QUEUES"), *queues;
	PyObject *list;

	if (!broker_usable(self, "look for work"))
		return NULL;
	queues = PyMem_Malloc(most * sizeof(*queues));
	if (!queues)
		return PyErr_NoMemory();
	list = list_of_numbers(queues, shmq_spiller_pending(self->handle, queues, most));
	PyMem_Free(queues);
	return list;
}

METHOD(broker, next_request, , )
{
	shmq_request request;
	int status;

	BROKER_CALL(self, status, shmq_request_next(self->handle, until, &request));
	if (status == SHMQ_EMPTY)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "take a request");
	return Py_BuildValue("(IIssI(KK))", request.ticket, request.kind, request.topic,
	                     request.channel, request.client, (unsigned long long)request.numbers[0],
	                     (unsigned long long)request.numbers[1]);
}

/* ---- topics and queues ---------------------------------------------------------------------- */

NONE_METHOD(enter_queue, (U32, queue)(U64, serial)(U32, topic)(TEXT_OR_NONE, channel), BROKER_CALL,
            shmq_queue_enter(self->handle, queue, serial, topic, channel, until),
            "enter channel '%s'", channel ? channel : "(backlog)")
NONE_METHOD(renamed, (U32, queue)(TEXT, base), BROKER_CALL,
            shmq_queue_renamed(self->handle, queue, base, until), "name the files of queue %u",
            queue)
NONE_METHOD(remove_topic, (U32, topic)(U32, generation), BROKER_CALL,
            shmq_topic_remove(self->handle, topic, generation, until), "remove topic %u", topic)
COUNT_METHOD(trim, (U32, queue), uint64_t, BROKER_TRY,
             shmq_trim(self->handle, queue, until, &count), "give back memory of queue %u", queue)

METHOD(broker, create_topic, (TEXT, topic)(U64, clock_floor), (SETTINGS, settings, {0}))
{
	uint32_t index, generation;
	int status;

	BROKER_CALL(self, status,
	            shmq_topic_create(self->handle, topic, clock_floor, &settings, until, &index,
	                              &generation));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "create topic '%s'", topic);
	return Py_BuildValue("(II)", index, generation);
}

METHOD(broker, reserve_queue, , )
{
	uint64_t serial;
	uint32_t queue;
	int status;

	BROKER_CALL(self, status, shmq_queue_reserve(self->handle, until, &queue, &serial));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "reserve a queue");
	return Py_BuildValue("(IK)", queue, (unsigned long long)serial);
}

/* clang-format off */
METHOD(broker, create_queue, (INT, fd)(U32, queue)(U64, serial)(U32, topic)(TEXT, base),
       (U64, disk_read, 0)(U64, disk_write, 0)(U64, disk_depth, 0)
       (BOOL, ephemeral, false)(BOOL, paused, false)
       (U64, chunk, 0)(U64, chunk_depth, 0)(SETTINGS, settings, {0}))
/* clang-format on */
{
	shmq_queue_spec spec = {.queue = queue,
	                        .topic = topic,
	                        .serial = serial,
	                        .base = base,
	                        .disk_read = disk_read,
	                        .disk_write = disk_write,
	                        .disk_depth = disk_depth,
	                        .ephemeral = ephemeral,
	                        .paused = paused,
	                        .settings = &settings};
	int status;

	BROKER_CALL(self, status, shmq_queue_create(self->handle, fd, &spec));
	if (status == SHMQ_OK && chunk)
		status = shmq_chunk_start(fd, chunk, chunk_depth);
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "create the queue of '%s'", base);
	Py_RETURN_NONE;
}

METHOD(broker, take_over, (U32, topic)(TEXT, channel), (SETTINGS, settings, {0}))
{
	uint64_t serial;
	uint32_t queue;
	int status;

	BROKER_CALL(
			self, status,
			shmq_queue_take_over(self->handle, topic, channel, &settings, until, &queue, &serial));
	if (status == SHMQ_GONE || status == SHMQ_INVALID)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "take the backlog over as '%s'", channel);
	return Py_BuildValue("(IK)", queue, (unsigned long long)serial);
}

METHOD(broker, remove_queue, (U32, queue)(U64, serial), (BOOL, closed, false))
{
	int status;

	BROKER_CALL(self, status, shmq_queue_remove(self->handle, queue, serial, closed, until));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "remove queue %u", queue);
	Py_RETURN_NONE;
}

METHOD(broker, erase_queue, (U32, queue)(U64, serial), (BOOL, idle, false))
{
	bool erased;
	int status;

	BROKER_CALL(self, status, shmq_queue_erase(self->handle, queue, serial, idle, until, &erased));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "erase queue %u", queue);
	return PyBool_FromLong(erased);
}

/* ---- deadlines ------------------------------------------------------------------------------ */

METHOD(broker, expire, (U32, queue),
       (U32, limit, 256)(I64_OR_NONE, now, shmq_now())(I64_OR_NONE, realtime, shmq_realtime()))
{
	const shmq_expiry step = {.now = now, .realtime = realtime, .limit = limit};
	uint32_t expired = 0, due = 0;
	int status;

	BROKER_TRY(self, status, shmq_expire(self->handle, queue, &step, until, &expired, &due));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "expire messages of queue %u", queue);
	return Py_BuildValue("(II)", expired, due);
}

METHOD(broker, dead_waiting, (U32, queue), )
{
	if (!broker_usable(self, "look for dead letters"))
		return NULL;
	return PyBool_FromLong(shmq_dead_waiting(self->handle, queue));
}

COUNT_METHOD(dead_postpone, (U32, queue)(I64, due)(U32, n), uint32_t, BROKER_TRY,
             shmq_dead_postpone(self->handle, queue, due, n, until, &count),
             "put off the dead letters of queue %u", queue)

METHOD(broker, sweep, (U32, queue), )
{
	shmq_sweep sweep = {0};
	int status;

	do {
		BROKER_TRY(self, status, shmq_sweep_expired(self->handle, queue, until, &sweep));
	} while (status == SHMQ_OK && sweep.step != SHMQ_SWEPT);
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "sweep queue %u", queue);
	return PyLong_FromUnsignedLong(sweep.expired);
}

/* ---- overflow ------------------------------------------------------------------------------- */

NONE_METHOD(disk_adopt,
            (U32, queue)(U64, read_position)(U64, write_position)(U64, depth)(U64, chunk),
            BROKER_CALL,
            shmq_disk_adopt(self->handle, queue, read_position, write_position, depth, chunk,
                            until),
            "take up the files of queue %u", queue)
COUNT_METHOD(evict_read_ahead, (U32, queue), uint32_t, BROKER_CALL,
             shmq_evict_read_ahead(self->handle, queue, until, &count),
             "give back what queue %u read ahead", queue)

METHOD(broker, stage_oldest, (U32, queue)(U32, n), )
{
	uint32_t moved = 0;
	int status;

	BROKER_TRY(self, status, shmq_stage_oldest(self->handle, queue, n, until, &moved));
	if (status != SHMQ_OK && status != SHMQ_EMPTY)
		return raise_status(self->state, status, NULL, "stage the oldest messages of queue %u",
		                    queue);
	return PyLong_FromUnsignedLong(moved);
}

METHOD(broker, spill_begin, (U32, queue)(U32, n)(U64, max_bytes), (U32, source, SHMQ_SPILL_READY))
{
	shmq_spill spill;
	int status;

	if (!spill_room(&spill, queue, n, false))
		return NULL;
	BROKER_TRY(self, status,
	           shmq_spill_begin(self->handle, queue, (enum shmq_spill_source)source, n, max_bytes,
	                            until, &spill));
	if (status == SHMQ_OK && spill.count)
		return spill_new(self, &spill);
	spill_room_free(&spill);
	if (status == SHMQ_OK || status == SHMQ_EMPTY ||
	    (source == SHMQ_SPILL_PREPEND_FLUSH && status == SHMQ_FULL))
		Py_RETURN_NONE;
	return raise_status(self->state, status, NULL, "spill queue %u", queue);
}

METHOD(broker, restore, (U32, queue)(OBJECT, data)(U64, position)(U64, next_position), )
{
	shmq_records records = {.position = position, .next_position = next_position};
	uint32_t taken = 0;
	uint64_t used = 0;
	Py_buffer view;
	int status;

	if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	records.data = view.buf;
	records.length = (uint64_t)view.len;
	BROKER_TRY(self, status, shmq_restore(self->handle, queue, &records, until, &taken, &used));
	PyBuffer_Release(&view);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK && status != SHMQ_FULL)
		return raise_status(self->state, status, NULL, "restore messages of queue %u", queue);
	return Py_BuildValue("(IK)", taken, (unsigned long long)used);
}

METHOD(broker, disk_set, (U32, queue)(U64, expected)(U64, read_position)(U64, depth), )
{
	int status;

	BROKER_CALL(self, status,
	            shmq_disk_set(self->handle, queue, expected, read_position, depth, until));
	if (status != SHMQ_OK && status != SHMQ_GONE)
		return raise_status(self->state, status, NULL, "move the read position of queue %u", queue);
	return PyBool_FromLong(status == SHMQ_OK);
}

METHOD(broker, pump, (U32, topic)(U32, generation)(U32, n), )
{
	uint32_t moved = 0;
	int status;

	BROKER_TRY(self, status, shmq_pump(self->handle, topic, generation, n, until, &moved));
	if (status == SHMQ_FULL)
		return PyLong_FromLong(-1);
	if (status != SHMQ_OK && status != SHMQ_EMPTY)
		return raise_status(self->state, status, NULL, "move the backlog of topic %u", topic);
	return PyLong_FromUnsignedLong(moved);
}

/* ---- deferred messages on disk -------------------------------------------------------------- */

NONE_METHOD(chunk_depth, (U32, queue)(U64, depth), BROKER_CALL,
            shmq_chunk_depth(self->handle, queue, depth, until),
            "count deferred messages of queue %u", queue)

METHOD(broker, chunk_begin, (U32, queue)(U64, chunk)(I64, from_due)(U32, n)(U64, max_bytes), )
{
	const shmq_chunk_wish wish = {
		.chunk = chunk, .from_due = from_due, .max_bytes = max_bytes, .n = n};
	shmq_spill spill;
	int status;

	if (!spill_room(&spill, queue, n, true))
		return NULL;
	BROKER_TRY(self, status, shmq_chunk_begin(self->handle, queue, &wish, until, &spill));
	if (status == SHMQ_OK)
		return spill_new(self, &spill);
	spill_room_free(&spill);
	if (status == SHMQ_EMPTY)
		Py_RETURN_NONE;
	return raise_status(self->state, status, NULL, "write deferred messages of queue %u", queue);
}

METHOD(broker, chunk_load, (U32, queue)(OBJECT, data)(OBJECT, dues)(U64, position), )
{
	Py_buffer records, times;
	shmq_chunk_records in;
	int status = CORE_RAISED;
	uint32_t taken = 0;

	if (PyObject_GetBuffer(data, &records, PyBUF_SIMPLE) < 0)
		return NULL;
	if (PyObject_GetBuffer(dues, &times, PyBUF_SIMPLE) == 0) {
		in = (shmq_chunk_records){.data = records.buf,
		                          .length = (uint64_t)records.len,
		                          .dues = times.buf,
		                          .n = (uint32_t)((size_t)times.len / sizeof(int64_t)),
		                          .position = position};
		if (times.len % sizeof(int64_t) || (uintptr_t)times.buf % sizeof(int64_t))
			PyErr_SetString(PyExc_ValueError, "dues must be an array of int64");
		else
			BROKER_TRY(self, status, shmq_chunk_load(self->handle, queue, &in, until, &taken));
		PyBuffer_Release(&times);
	}
	PyBuffer_Release(&records);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK && status != SHMQ_FULL)
		return raise_status(self->state, status, NULL, "load deferred messages of queue %u", queue);
	return PyLong_FromUnsignedLong(taken);
}

/* ---- repair --------------------------------------------------------------------------------- */

NONE_METHOD(adopt, (U32, queue), BROKER_CALL, shmq_adopt(self->handle, queue, until),
            "adopt queue %u", queue)
NONE_METHOD(rebuild, (U32, queue), BROKER_CALL, shmq_rebuild(self->handle, queue, until),
            "rebuild queue %u", queue)

METHOD(broker, audit, (U32, queue), )
{
	bool repaired;
	int status;

	BROKER_TRY(self, status, shmq_audit(self->handle, queue, until, &repaired));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "audit queue %u", queue);
	return PyBool_FromLong(repaired);
}

/* ---- reaper --------------------------------------------------------------------------------- */

TELL_METHOD(reap_spare, (U32, client)(U32, generation),
            shmq_reap_spare(self->handle, client, generation), "spare a client")
COUNT_METHOD(reap, (U32, client)(U32, generation), uint32_t, BROKER_TRY,
             shmq_reap(self->handle, client, generation, until, &count),
             "give back what client %u held", client)

static PyObject *dead_item(const void *array, uint32_t i)
{
	const shmq_dead *dead = (const shmq_dead *)array + i;

	return Py_BuildValue("(IIiKK)", dead->client, dead->generation, dead->pid,
	                     (unsigned long long)dead->start_time, (unsigned long long)dead->program);
}

METHOD(broker, reap_scan, , (INT, ended, -1)(I64, every, SECOND_NS)(I64, deadline, 0))
{
	uint32_t most = constant_of("CLIENTS"), found = 0;
	PyObject *list = NULL;
	shmq_dead *dead;
	int status;

	if (!broker_usable(self, "look for dead clients"))
		return NULL;
	dead = PyMem_Malloc(most * sizeof(*dead));
	if (!dead)
		return PyErr_NoMemory();
	CORE_WAIT(self, status, deadline, WAIT_SLICE_NS,
	          shmq_reap_wait(self->handle, ended, every, until, dead, most, &found));
	if (status == SHMQ_OK || status == SHMQ_EMPTY)
		list = list_of(found, dead_item, dead);
	else
		raise_status(self->state, status, NULL, "look for dead clients");
	PyMem_Free(dead);
	return list;
}
