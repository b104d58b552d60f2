import io.aeron.Aeron;
import io.aeron.ExclusivePublication;
import io.aeron.Subscription;
import io.aeron.driver.MediaDriver;
import io.aeron.driver.ThreadingMode;
import io.aeron.logbuffer.FragmentHandler;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import net.openhft.chronicle.bytes.Bytes;
import net.openhft.chronicle.queue.ChronicleQueue;
import net.openhft.chronicle.queue.ExcerptAppender;
import net.openhft.chronicle.queue.ExcerptTailer;
import org.agrona.concurrent.UnsafeBuffer;

/**
 * Java's transports between two processes of one host, for tools/bench/javapeers.py.
 *
 * <pre>java Peers aeron|chronicle send|receive|call|answer DIRECTORY SIZE SECONDS</pre>
 *
 * send and receive are the ends of one way, call and answer those of a round trip. Both ends copy
 * bodies, poll, and acknowledge nothing. Each prints `ready` when it is warm, begins when a line
 * comes, prints one JSON object and ends with its stdin.
 */
public final class Peers {
    private static final int WARM = 200_000, WARM_CALLS = 50_000, CHECK_EVERY = 100, SPINS = 200;
    private static final long PATIENCE_NS = 60_000_000_000L;

    /** One direction. offer: false while there is no room. poll: the length of a body, -1: none. */
    private interface Way {
        boolean offer(byte[] body, int length);

        int poll(byte[] into);
    }

    private static final long BEGAN = System.nanoTime();

    /** Called each time that nothing could be done; ends the process where nobody comes any more. */
    private static int idle(int turns) {
        if (turns % SPINS != SPINS - 1) {
            Thread.onSpinWait();
        } else {
            Thread.yield();
            if (System.nanoTime() - BEGAN > PATIENCE_NS) {
                System.err.println("nothing came, or there was no room, until the end");
                Runtime.getRuntime().halt(1);
            }
        }
        return turns + 1;
    }

    private static void send(Way way, byte[] body, int length) {
        for (int turns = 0; !way.offer(body, length); ) {
            turns = idle(turns);
        }
    }

    private static int receive(Way way, byte[] into) {
        int length;
        for (int turns = 0; (length = way.poll(into)) < 0; ) {
            turns = idle(turns);
        }
        return length;
    }

    // ---- Aeron ----

    private static Way aeron(Path directory, boolean serves, int stream, boolean out) {
        String where = directory.resolve("aeron").toString();
        if (serves && driver == null) {
            driver = MediaDriver.launch(new MediaDriver.Context()
                    .aeronDirectoryName(where)
                    .threadingMode(ThreadingMode.SHARED)
                    .termBufferSparseFile(false));
        }
        if (aeron == null) {
            aeron = Aeron.connect(new Aeron.Context().aeronDirectoryName(where));
        }
        String channel = "aeron:ipc?term-length=16m";
        if (out) {
            ExclusivePublication publication = aeron.addExclusivePublication(channel, stream);
            UnsafeBuffer buffer = new UnsafeBuffer(new byte[0]);
            return new Way() {
                public boolean offer(byte[] body, int length) {
                    buffer.wrap(body);
                    return publication.offer(buffer, 0, length) > 0;
                }

                public int poll(byte[] into) {
                    throw new UnsupportedOperationException();
                }
            };
        }
        Subscription subscription = aeron.addSubscription(channel, stream);
        return new Way() {
            private byte[] to;
            private int got;
            private final FragmentHandler handler = (buffer, offset, length, header) -> {
                buffer.getBytes(offset, to, 0, length);
                got = length;
            };

            public boolean offer(byte[] body, int length) {
                throw new UnsupportedOperationException();
            }

            public int poll(byte[] into) {
                to = into;
                return subscription.poll(handler, 1) == 0 ? -1 : got;
            }
        };
    }

    private static MediaDriver driver;
    private static Aeron aeron;

    // ---- Chronicle Queue ----

    private static Way chronicle(Path directory, int stream, boolean out) {
        ChronicleQueue queue = ChronicleQueue.singleBuilder(directory.resolve("queue" + stream))
                .build();
        Bytes<?> bytes = Bytes.allocateElasticDirect(4096);
        if (out) {
            ExcerptAppender appender = queue.createAppender();
            return new Way() {
                public boolean offer(byte[] body, int length) {
                    bytes.clear();
                    bytes.write(body, 0, length);
                    appender.writeBytes(bytes);
                    return true;
                }

                public int poll(byte[] into) {
                    throw new UnsupportedOperationException();
                }
            };
        }
        ExcerptTailer tailer = queue.createTailer();
        return new Way() {
            public boolean offer(byte[] body, int length) {
                throw new UnsupportedOperationException();
            }

            public int poll(byte[] into) {
                bytes.clear();
                return tailer.readBytes(bytes) ? bytes.read(into) : -1;
            }
        };
    }

    // ---- roles ----

    private static void ready() throws Exception {
        System.out.println("ready");
        while (System.in.read() != '\n') {
            Thread.onSpinWait();
        }
    }

    private static void sending(Way way, byte[] body, double seconds) throws Exception {
        for (int i = 0; i < WARM; i++) {
            send(way, body, body.length);
        }
        send(way, body, 1);
        ready();
        long end = System.nanoTime() + (long) (seconds * 1e9);
        while (System.nanoTime() < end) {
            for (int i = 0; i < CHECK_EVERY; i++) {
                send(way, body, body.length);
            }
        }
        send(way, body, 1);
        System.out.println("{}");
    }

    private static void receiving(Way way, byte[] into) throws Exception {
        while (receive(way, into) > 1) {
            Thread.onSpinWait();
        }
        ready();
        long messages = 0;
        while (receive(way, into) > 1) {
            messages++;
        }
        System.out.printf("{\"messages\": %d, \"ended\": %d}%n", messages, System.nanoTime());
    }

    private static void calling(Way there, Way back, byte[] body, double seconds)
            throws Exception {
        byte[] into = new byte[body.length];
        for (int i = 0; i < WARM_CALLS; i++) {
            send(there, body, body.length);
            receive(back, into);
        }
        send(there, body, 1);
        ready();
        long[] samples = new long[1 << 23];
        int n = 0;
        long began = System.nanoTime(), before = began, end = began + (long) (seconds * 1e9);
        while (before < end && n < samples.length) {
            send(there, body, body.length);
            receive(back, into);
            long now = System.nanoTime();
            samples[n++] = now - before;
            before = now;
        }
        send(there, body, 1);
        Arrays.sort(samples, 0, n);
        System.out.printf("{\"messages\": %d, \"began\": %d, \"ended\": %d, \"p50_us\": %s, "
                + "\"p99_us\": %s}%n", n, began, before, samples[n / 2] / 1e3,
                samples[(int) (n * 99L / 100)] / 1e3);
    }

    private static void answering(Way there, Way back, byte[] into) throws Exception {
        int length;
        while ((length = receive(there, into)) > 1) {
            send(back, into, length);
        }
        ready();
        while ((length = receive(there, into)) > 1) {
            send(back, into, length);
        }
        System.out.println("{}");
    }

    public static void main(String[] words) throws Exception {
        String kind = words[0], role = words[1];
        Path directory = Path.of(words[2]);
        byte[] body = new byte[Integer.parseInt(words[3])];
        double seconds = Double.parseDouble(words[4]);
        boolean first = role.equals("send") || role.equals("call");
        Way[] ways = new Way[2];
        Files.writeString(directory.resolve("pid-" + role),
                Long.toString(ProcessHandle.current().pid()));
        for (int i = 0; i < (role.equals("send") || role.equals("receive")
                ? 1 : 2); i++) {
            boolean out = first == (i == 0);
            ways[i] = kind.equals("aeron")
                    ? aeron(directory, !first, i + 1, out) : chronicle(directory, i, out);
        }
        switch (role) {
            case "send" -> sending(ways[0], body, seconds);
            case "receive" -> receiving(ways[0], body);
            case "call" -> calling(ways[0], ways[1], body, seconds);
            default -> answering(ways[0], ways[1], body);
        }
        while (System.in.read() >= 0) {
            Thread.onSpinWait();
        }
        if (aeron != null) {
            aeron.close();
        }
        if (driver != null) {
            driver.close();
        }
        System.exit(0);
    }
}
