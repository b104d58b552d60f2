/* The methods of _native.Broker that only the supervisor calls: none of them holds the GIL. */
#include "module.h"

#define CLIENTS_MOST 1024
#define QUEUES_MOST 16384

static PyObject *done(broker_object *self, int status, const char *tried)
{
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "%s", tried);
	Py_RETURN_NONE;
}

static PyObject *done_on(broker_object *self, int status, const char *tried, uint32_t index)
{
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "%s %u", tried, index);
	Py_RETURN_NONE;
}

/* ---- the supervisor itself ------------------------------------------------------------------ */

PyObject *broker_set_data_path(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
	const char *path;
	int status;

	if (ARGUMENTS("set_data_path", 1, {"path", ARGUMENT_TEXT, &path}) < 0)
		return NULL;
	BROKER_CALL(self, status, ((void)until, shmq_data_path_set(self->handle, path)));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "say where the files are");
	Py_RETURN_NONE;
}

PyObject *broker_disk_trouble(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	uint32_t error;

	if (ARGUMENTS("disk_trouble", 1, {"errno", ARGUMENT_U32, &error}) < 0 ||
	    !broker_usable(self, "say how the disk is"))
		return NULL;
	shmq_disk_trouble_set(self->handle, (int)error);
	Py_RETURN_NONE;
}

PyObject *broker_supervise(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	shmq_limits limits = {0};
	int status;

	if (limits_parse("supervise", args, nargs, kwnames, &limits) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_supervise(self->handle, &limits, until));
	return done(self, status, "become the supervisor");
}

PyObject *broker_supervisor_wait(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames)
{
	int64_t deadline;
	uint32_t why = 0;
	int status;

	if (ARGUMENTS("supervisor_wait", 1, {"deadline", ARGUMENT_I64, &deadline}) < 0)
		return NULL;
	do {
		if (!broker_usable(self, "wait for work"))
			return NULL;
		CORE_WAIT(self, status, deadline, WAIT_SLICE_NS,
		          shmq_supervisor_wait(self->handle, until, &why));
		if (status != SHMQ_OK && status != SHMQ_TIMEOUT && status != SHMQ_INTERRUPTED)
			return raise_status(self->state, status, NULL, "wait for work");
		if (PyErr_CheckSignals() < 0)
			return NULL;
	} while (!why && shmq_now() < deadline);
	return PyLong_FromUnsignedLong(why);
}

PyObject *broker_attend(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
	uint32_t queue;

	if (ARGUMENTS("attend", 1, {"queue", ARGUMENT_U32, &queue}) < 0 ||
	    !broker_usable(self, "have the spiller look"))
		return NULL;
	shmq_attend(self->handle, queue);
	Py_RETURN_NONE;
}

PyObject *broker_scan_at(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
	int64_t deadline, due;

	if (ARGUMENTS("scan_at", 2, {"deadline", ARGUMENT_I64, &deadline},
	              {"due", ARGUMENT_I64, &due}) < 0 ||
	    !broker_usable(self, "say when it scans"))
		return NULL;
	shmq_scan_at(self->handle, deadline, due);
	Py_RETURN_NONE;
}

PyObject *broker_attention(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	uint32_t queues[QUEUES_MOST], count;
	PyObject *list;

	if (arguments_parse("attention", NULL, 0, 0, args, nargs, kwnames) < 0 ||
	    !broker_usable(self, "look for work"))
		return NULL;
	count = shmq_attention(self->handle, queues, QUEUES_MOST);
	list = PyList_New(count);
	for (uint32_t i = 0; list && i < count; i++) {
		PyObject *index = PyLong_FromUnsignedLong(queues[i]);

		if (!index || PyList_SetItem(list, i, index) < 0)
			Py_CLEAR(list);
	}
	return list;
}

PyObject *broker_names_written(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
	uint64_t replaced, written;

	if (ARGUMENTS("names_written", 2, {"replaced", ARGUMENT_U64, &replaced},
	              {"written", ARGUMENT_U64, &written}) < 0 ||
	    !broker_usable(self, "note the metadata's time"))
		return NULL;
	shmq_names_written(self->handle, replaced, written);
	Py_RETURN_NONE;
}

PyObject *broker_stopping(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
	if (arguments_parse("stopping", NULL, 0, 0, args, nargs, kwnames) < 0 ||
	    !broker_usable(self, "stop the instance"))
		return NULL;
	shmq_supervisor_stopping(self->handle);
	Py_RETURN_NONE;
}

PyObject *broker_close_directory(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames)
{
	if (arguments_parse("close_directory", NULL, 0, 0, args, nargs, kwnames) < 0 ||
	    !broker_usable(self, "close the directory"))
		return NULL;
	shmq_directory_close(self->handle);
	Py_RETURN_NONE;
}

PyObject *broker_next_request(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	shmq_request request;
	int status;

	if (arguments_parse("next_request", NULL, 0, 0, args, nargs, kwnames) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_request_next(self->handle, until, &request));
	if (status == SHMQ_EMPTY)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "take a request");
	return Py_BuildValue("(IIssI)", request.ticket, request.kind, request.topic, request.channel,
	                     request.client);
}

PyObject *broker_answer(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
	uint32_t ticket;
	int status;

	if (ARGUMENTS("answer", 2, {"ticket", ARGUMENT_U32, &ticket},
	              {"status", ARGUMENT_INT, &status}) < 0 ||
	    !broker_usable(self, "answer a request"))
		return NULL;
	shmq_request_answer(self->handle, ticket, status);
	Py_RETURN_NONE;
}

/* ---- topics and queues ---------------------------------------------------------------------- */

PyObject *broker_create_topic(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	uint32_t topic, generation;
	uint64_t clock_floor;
	const char *name;
	int status;

	if (ARGUMENTS("create_topic", 2, {"topic", ARGUMENT_TEXT, &name},
	              {"clock_floor", ARGUMENT_U64, &clock_floor}) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_topic_create(self->handle, name, clock_floor, until, &topic, &generation));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "create topic '%s'", name);
	return Py_BuildValue("(II)", topic, generation);
}

PyObject *broker_reserve_queue(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
	uint64_t serial;
	uint32_t queue;
	int status;

	if (arguments_parse("reserve_queue", NULL, 0, 0, args, nargs, kwnames) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_queue_reserve(self->handle, until, &queue, &serial));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "reserve a queue");
	return Py_BuildValue("(IK)", queue, (unsigned long long)serial);
}

PyObject *broker_create_queue(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	uint64_t serial, disk_read = 0, disk_write = 0, disk_depth = 0, chunk = 0, chunk_depth = 0;
	bool ephemeral = false, paused = false;
	uint32_t queue, topic;
	const char *base;
	int fd, status;

	if (ARGUMENTS("create_queue", 5, {"fd", ARGUMENT_INT, &fd}, {"queue", ARGUMENT_U32, &queue},
	              {"serial", ARGUMENT_U64, &serial}, {"topic", ARGUMENT_U32, &topic},
	              {"base", ARGUMENT_TEXT, &base}, {"disk_read", ARGUMENT_U64, &disk_read},
	              {"disk_write", ARGUMENT_U64, &disk_write},
	              {"disk_depth", ARGUMENT_U64, &disk_depth},
	              {"ephemeral", ARGUMENT_BOOL, &ephemeral}, {"paused", ARGUMENT_BOOL, &paused},
	              {"chunk", ARGUMENT_U64, &chunk}, {"chunk_depth", ARGUMENT_U64, &chunk_depth}) < 0)
		return NULL;
	BROKER_CALL(
			self, status,
			((void)until, shmq_queue_create(self->handle, fd, queue, serial, topic, base, disk_read,
			                                disk_write, disk_depth, ephemeral, paused)));
	if (status == SHMQ_OK && chunk)
		status = shmq_chunk_start(fd, chunk, chunk_depth);
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "create the queue of '%s'", base);
	Py_RETURN_NONE;
}

PyObject *broker_enter_queue(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
	uint32_t queue, topic;
	const char *channel;
	uint64_t serial;
	int status;

	if (ARGUMENTS("enter_queue", 4, {"queue", ARGUMENT_U32, &queue},
	              {"serial", ARGUMENT_U64, &serial}, {"topic", ARGUMENT_U32, &topic},
	              {"channel", ARGUMENT_TEXT_OR_NONE, &channel}) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_queue_enter(self->handle, queue, serial, topic, channel, until));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "enter channel '%s'",
		                    channel ? channel : "(backlog)");
	Py_RETURN_NONE;
}

PyObject *broker_take_over(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	uint32_t topic, queue;
	const char *channel;
	uint64_t serial;
	int status;

	if (ARGUMENTS("take_over", 2, {"topic", ARGUMENT_U32, &topic},
	              {"channel", ARGUMENT_TEXT, &channel}) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_queue_take_over(self->handle, topic, channel, until, &queue, &serial));
	if (status == SHMQ_GONE || status == SHMQ_INVALID)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "take the backlog over as '%s'", channel);
	return Py_BuildValue("(IK)", queue, (unsigned long long)serial);
}

PyObject *broker_renamed(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
	const char *base;
	uint32_t queue;
	int status;

	if (ARGUMENTS("renamed", 2, {"queue", ARGUMENT_U32, &queue}, {"base", ARGUMENT_TEXT, &base}) <
	    0)
		return NULL;
	BROKER_CALL(self, status, shmq_queue_renamed(self->handle, queue, base, until));
	return done_on(self, status, "name the files of queue", queue);
}

PyObject *broker_remove_queue(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	bool closed = false, idle = false, removed = true;
	uint64_t serial;
	uint32_t queue;
	int status;

	if (ARGUMENTS("remove_queue", 2, {"queue", ARGUMENT_U32, &queue},
	              {"serial", ARGUMENT_U64, &serial}, {"closed", ARGUMENT_BOOL, &closed},
	              {"idle", ARGUMENT_BOOL, &idle}) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            idle ? shmq_queue_remove_idle(self->handle, queue, serial, until, &removed)
	                 : shmq_queue_remove(self->handle, queue, serial, closed, until));
	if (status != SHMQ_OK)
		return done_on(self, status, "remove queue", queue);
	return PyBool_FromLong(removed);
}

PyObject *broker_give_back(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	uint64_t bytes = 0;
	uint32_t queue;
	int status;

	if (ARGUMENTS("give_back", 1, {"queue", ARGUMENT_U32, &queue}) < 0)
		return NULL;
	BROKER_TRY(self, status, shmq_give_back(self->handle, queue, until, &bytes));
	if (status != SHMQ_OK)
		return done_on(self, status, "give back memory of queue", queue);
	return PyLong_FromUnsignedLongLong(bytes);
}

PyObject *broker_remove_topic(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	uint32_t topic, generation;
	int status;

	if (ARGUMENTS("remove_topic", 2, {"topic", ARGUMENT_U32, &topic},
	              {"generation", ARGUMENT_U32, &generation}) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_topic_remove(self->handle, topic, generation, until));
	return done_on(self, status, "remove topic", topic);
}

/* ---- scan, overflow ------------------------------------------------------------------------- */

PyObject *broker_expire(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
	uint32_t queue, limit = 256, expired = 0, due = 0;
	PyObject *now = Py_None, *realtime = Py_None;
	int64_t now_ns, realtime_ns;
	int status;

	if (ARGUMENTS("expire", 1, {"queue", ARGUMENT_U32, &queue}, {"limit", ARGUMENT_U32, &limit},
	              {"now", ARGUMENT_OBJECT, &now}, {"realtime", ARGUMENT_OBJECT, &realtime}) < 0)
		return NULL;
	now_ns = now == Py_None ? shmq_now() : PyLong_AsLongLong(now);
	realtime_ns = realtime == Py_None ? shmq_realtime() : PyLong_AsLongLong(realtime);
	if (PyErr_Occurred())
		return NULL;
	BROKER_TRY(
			self, status,
			shmq_expire(self->handle, queue, now_ns, realtime_ns, limit, until, &expired, &due));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "expire messages of queue %u", queue);
	return Py_BuildValue("(II)", expired, due);
}

PyObject *broker_advance(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
	uint32_t queue, n, moved = 0;
	int status;

	if (ARGUMENTS("advance", 2, {"queue", ARGUMENT_U32, &queue}, {"n", ARGUMENT_U32, &n}) < 0)
		return NULL;
	BROKER_TRY(self, status, shmq_advance(self->handle, queue, n, until, &moved));
	if (status != SHMQ_OK && status != SHMQ_EMPTY)
		return raise_status(self->state, status, NULL, "advance queue %u", queue);
	return PyLong_FromUnsignedLong(moved);
}

PyObject *broker_spill_begin(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
	bool everything = false, ahead = false, returned = false, front = false,
	     out = false;
	uint64_t max_bytes;
	shmq_spill spill = {0};
	uint32_t n;
	int status;

	if (ARGUMENTS("spill_begin", 3, {"queue", ARGUMENT_U32, &spill.queue}, {"n", ARGUMENT_U32, &n},
	              {"max_bytes", ARGUMENT_U64, &max_bytes},
	              {"everything", ARGUMENT_BOOL, &everything},
	              {"ahead", ARGUMENT_BOOL, &ahead},
	              {"returned", ARGUMENT_BOOL, &returned}, {"front", ARGUMENT_BOOL, &front},
	              {"out", ARGUMENT_BOOL, &out}) < 0)
		return NULL;
	spill.slots = PyMem_Calloc(n + !n, sizeof(*spill.slots));
	spill.lengths = PyMem_Calloc(n + !n, sizeof(*spill.lengths));
	status = CORE_RAISED;
	if (spill.slots && spill.lengths)
		BROKER_TRY(self, status,
		            shmq_spill_begin(self->handle, spill.queue,
		                             ahead        ? SHMQ_SPILL_AHEAD
		                             : everything ? SHMQ_SPILL_ALL
		                             : returned   ? SHMQ_SPILL_RETURNED
		                             : front      ? SHMQ_SPILL_FRONT
		                             : out        ? SHMQ_SPILL_OUT
		                                          : SHMQ_SPILL_READY,
		                             n, max_bytes, until, &spill));
	else
		PyErr_NoMemory();
	if (status == SHMQ_OK && spill.count)
		return spill_new(self, &spill);
	PyMem_Free(spill.slots);
	PyMem_Free(spill.lengths);
	return status == SHMQ_EMPTY || (ahead && status == SHMQ_FULL)
	               ? Py_NewRef(Py_None)
	               : done_on(self, status, "spill queue", spill.queue);
}

PyObject *broker_chunk_begin(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
	uint64_t chunk, max_bytes;
	shmq_spill spill = {0};
	int64_t from_due;
	PyObject *made;
	uint32_t n;
	int status;

	if (ARGUMENTS("chunk_begin", 5, {"queue", ARGUMENT_U32, &spill.queue},
	              {"chunk", ARGUMENT_U64, &chunk}, {"from_due", ARGUMENT_I64, &from_due},
	              {"n", ARGUMENT_U32, &n}, {"max_bytes", ARGUMENT_U64, &max_bytes}) < 0)
		return NULL;
	spill.slots = PyMem_Calloc(n + !n, sizeof(*spill.slots));
	spill.lengths = PyMem_Calloc(n + !n, sizeof(*spill.lengths));
	spill.positions = PyMem_Calloc(n + !n, sizeof(*spill.positions));
	status = CORE_RAISED;
	if (spill.slots && spill.lengths && spill.positions)
		BROKER_TRY(self, status,
		           shmq_chunk_begin(self->handle, spill.queue, chunk, from_due, n, max_bytes, until,
		                            &spill));
	else
		PyErr_NoMemory();
	if (status == SHMQ_OK) {
		uint64_t *dues = spill.positions;

		made = spill_new(self, &spill);
		PyMem_Free(dues);
		return made;
	}
	PyMem_Free(spill.slots);
	PyMem_Free(spill.lengths);
	PyMem_Free(spill.positions);
	return status == SHMQ_EMPTY ? Py_NewRef(Py_None)
	                            : done_on(self, status, "write deferred messages of queue",
	                                      spill.queue);
}

PyObject *broker_chunk_load(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	PyObject *data, *dues;
	Py_buffer records, times;
	uint32_t queue, taken = 0;
	uint64_t position;
	int status = CORE_RAISED;

	if (ARGUMENTS("chunk_load", 4, {"queue", ARGUMENT_U32, &queue},
	              {"data", ARGUMENT_OBJECT, &data}, {"dues", ARGUMENT_OBJECT, &dues},
	              {"position", ARGUMENT_U64, &position}) < 0 ||
	    PyObject_GetBuffer(data, &records, PyBUF_SIMPLE) < 0)
		return NULL;
	if (PyObject_GetBuffer(dues, &times, PyBUF_SIMPLE) == 0) {
		if (times.len % 8 || (uintptr_t)times.buf % 8)
			PyErr_SetString(PyExc_ValueError, "dues must be an array of int64");
		else
			BROKER_TRY(self, status,
			           shmq_chunk_load(self->handle, queue, records.buf, (uint64_t)records.len,
			                           times.buf, (uint32_t)(times.len / 8), position, until,
			                           &taken));
		PyBuffer_Release(&times);
	}
	PyBuffer_Release(&records);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK && status != SHMQ_FULL)
		return done_on(self, status, "load deferred messages of queue", queue);
	return PyLong_FromUnsignedLong(taken);
}

PyObject *broker_chunk_depth(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
	uint64_t depth;
	uint32_t queue;
	int status;

	if (ARGUMENTS("chunk_depth", 2, {"queue", ARGUMENT_U32, &queue},
	              {"depth", ARGUMENT_U64, &depth}) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_chunk_depth(self->handle, queue, depth, until));
	return done_on(self, status, "count deferred messages of queue", queue);
}

PyObject *broker_restore(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
	uint64_t position, next_position, used = 0;
	uint32_t queue, taken = 0;
	PyObject *data;
	Py_buffer view;
	int status;

	if (ARGUMENTS("restore", 4, {"queue", ARGUMENT_U32, &queue}, {"data", ARGUMENT_OBJECT, &data},
	              {"position", ARGUMENT_U64, &position},
	              {"next_position", ARGUMENT_U64, &next_position}) < 0 ||
	    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	BROKER_TRY(self, status,
	            shmq_restore(self->handle, queue, view.buf, (uint64_t)view.len, position,
	                         next_position, until, &taken, &used));
	PyBuffer_Release(&view);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK && status != SHMQ_FULL)
		return raise_status(self->state, status, NULL, "restore messages of queue %u", queue);
	return Py_BuildValue("(IK)", taken, (unsigned long long)used);
}

PyObject *broker_disk_adopt(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	uint64_t read_position, write_position, depth, chunk;
	uint32_t queue;
	int status;

	if (ARGUMENTS("disk_adopt", 5, {"queue", ARGUMENT_U32, &queue},
	              {"read_position", ARGUMENT_U64, &read_position},
	              {"write_position", ARGUMENT_U64, &write_position},
	              {"depth", ARGUMENT_U64, &depth}, {"chunk", ARGUMENT_U64, &chunk}) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_disk_adopt(self->handle, queue, read_position, write_position, depth, chunk,
	                            until));
	return done_on(self, status, "take up the files of queue", queue);
}

PyObject *broker_disk_set(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
	uint64_t expected, read_position, depth;
	uint32_t queue;
	int status;

	if (ARGUMENTS("disk_set", 4, {"queue", ARGUMENT_U32, &queue},
	              {"expected", ARGUMENT_U64, &expected},
	              {"read_position", ARGUMENT_U64, &read_position},
	              {"depth", ARGUMENT_U64, &depth}) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_disk_set(self->handle, queue, expected, read_position, depth, until));
	if (status != SHMQ_OK && status != SHMQ_GONE)
		return raise_status(self->state, status, NULL, "move the read position of queue %u", queue);
	return PyBool_FromLong(status == SHMQ_OK);
}

PyObject *broker_unrestore(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	uint32_t queue, count = 0;
	int status;

	if (ARGUMENTS("unrestore", 1, {"queue", ARGUMENT_U32, &queue}) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_unrestore(self->handle, queue, until, &count));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "give back what queue %u read ahead", queue);
	return PyLong_FromUnsignedLong(count);
}

PyObject *broker_pump(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames)
{
	uint32_t topic, generation, n, moved = 0;
	int status;

	if (ARGUMENTS("pump", 3, {"topic", ARGUMENT_U32, &topic},
	              {"generation", ARGUMENT_U32, &generation}, {"n", ARGUMENT_U32, &n}) < 0)
		return NULL;
	BROKER_TRY(self, status, shmq_pump(self->handle, topic, generation, n, until, &moved));
	if (status == SHMQ_FULL)
		return PyLong_FromLong(-1);
	if (status != SHMQ_OK && status != SHMQ_EMPTY)
		return raise_status(self->state, status, NULL, "move the backlog of topic %u", topic);
	return PyLong_FromUnsignedLong(moved);
}

/* ---- repair --------------------------------------------------------------------------------- */

PyObject *broker_adopt(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames)
{
	uint32_t queue;
	int status;

	if (ARGUMENTS("adopt", 1, {"queue", ARGUMENT_U32, &queue}) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_adopt(self->handle, queue, until));
	return done_on(self, status, "adopt queue", queue);
}

PyObject *broker_rebuild(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
	uint32_t queue;
	int status;

	if (ARGUMENTS("rebuild", 1, {"queue", ARGUMENT_U32, &queue}) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_rebuild(self->handle, queue, until));
	return done_on(self, status, "rebuild queue", queue);
}

PyObject *broker_audit(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames)
{
	uint32_t queue;
	bool repaired;
	int status;

	if (ARGUMENTS("audit", 1, {"queue", ARGUMENT_U32, &queue}) < 0)
		return NULL;
	BROKER_TRY(self, status, shmq_audit(self->handle, queue, until, &repaired));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "audit queue %u", queue);
	return PyBool_FromLong(repaired);
}

PyObject *broker_reap_scan(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	shmq_dead dead[CLIENTS_MOST];
	int64_t ended = -1, every = SECOND_NS, deadline = 0;
	uint32_t found = 0;
	PyObject *list;
	int status;

	if (ARGUMENTS("reap_scan", 0, {"ended", ARGUMENT_I64, &ended}, {"every", ARGUMENT_I64, &every},
	              {"deadline", ARGUMENT_I64, &deadline}) < 0 ||
	    !broker_usable(self, "look for dead clients"))
		return NULL;
	CORE_WAIT(self, status, deadline, WAIT_SLICE_NS,
	          shmq_reap_wait(self->handle, (int)ended, every, until, dead, CLIENTS_MOST, &found));
	if (status != SHMQ_OK && status != SHMQ_EMPTY)
		return raise_status(self->state, status, NULL, "look for dead clients");
	list = PyList_New(found);
	for (uint32_t i = 0; list && i < found; i++) {
		PyObject *row = Py_BuildValue("(IIiKK)", dead[i].client, dead[i].generation, dead[i].pid,
		                              (unsigned long long)dead[i].start_time,
		                              (unsigned long long)dead[i].program);

		if (!row || PyList_SetItem(list, i, row) < 0)
			Py_CLEAR(list);
	}
	return list;
}

PyObject *broker_reap_spare(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	uint32_t client, generation;

	if (ARGUMENTS("reap_spare", 2, {"client", ARGUMENT_U32, &client},
	              {"generation", ARGUMENT_U32, &generation}) < 0 ||
	    !broker_usable(self, "spare a client"))
		return NULL;
	shmq_reap_spare(self->handle, client, generation);
	Py_RETURN_NONE;
}

PyObject *broker_reap(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames)
{
	uint32_t client, generation, returned = 0;
	int status;

	if (ARGUMENTS("reap", 2, {"client", ARGUMENT_U32, &client},
	              {"generation", ARGUMENT_U32, &generation}) < 0)
		return NULL;
	BROKER_TRY(self, status, shmq_reap(self->handle, client, generation, until, &returned));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "give back what client %u held", client);
	return PyLong_FromUnsignedLong(returned);
}
