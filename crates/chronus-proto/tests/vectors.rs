//! The Python side and this one agree on every byte: both are held to the same vectors.

use std::collections::BTreeMap;

use chronus_proto::frame::{self, Kind, HEADER};
use chronus_proto::request::{self, ExecStart, Exit, FileRequest, Place, Request, Write};
use chronus_proto::Code;

type Vectors = BTreeMap<String, BTreeMap<String, String>>;

fn bytes(vectors: &Vectors, section: &str, name: &str) -> Vec<u8> {
    let text = &vectors[section][name];
    (0..text.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
        .collect()
}

fn load() -> Vectors {
    serde_json::from_str(include_str!("../vectors/vectors.json")).unwrap()
}

fn payload(frame: &[u8]) -> (Kind, u32, &[u8]) {
    let header = frame::parse(frame).unwrap().unwrap();
    assert_eq!(frame.len(), HEADER + header.len);
    (header.kind, header.channel, &frame[HEADER..])
}

/// Every request of the host is understood as it was meant.
#[test]
fn host_requests() {
    let v = load();
    let f = |name: &str| bytes(&v, "host_frames", name);
    let start = f("exec_start");
    let (kind, channel, body) = payload(&start);
    assert_eq!((kind, channel), (Kind::Request, 7));
    assert_eq!(
        request::decode(body),
        Ok(Request::ExecStart(ExecStart {
            id: "ex-1",
            argv: vec![b"@sh", b"-c", b"echo \xff"],
            env: vec![(b"PATH", b"/bin"), (b"LANG", "ü".as_bytes())],
            cwd: b"/work",
            user: b"1000:100",
            stdin: true,
            timeout_ms: Some(60_000),
            grace_ms: 500,
            rlimits: vec![("nofile", 1024, -1)],
        }))
    );
    let expected = [
        ("exec_attach", Request::ExecAttach("ex-1", 4096, 1 << 40)),
        ("exec_signal", Request::ExecSignal("ex-1", 15, true)),
        ("exec_stop", Request::ExecStop("ex-1", 2000)),
        ("exec_forget", Request::ExecForget("ex-1")),
        ("exec_list", Request::ExecList),
        ("ping", Request::Ping),
        (
            "read",
            Request::File(FileRequest::Read(
                Place {
                    path: b"/a\n\xff",
                    user: b"0",
                },
                5,
                None,
            )),
        ),
        (
            "write",
            Request::File(FileRequest::Write(
                Place {
                    path: b"/b",
                    user: b"bob",
                },
                Write {
                    mode: Some(0o4755),
                    offset: None,
                    append: false,
                    parents: true,
                },
            )),
        ),
        (
            "move",
            Request::File(FileRequest::Move(
                Place {
                    path: b"/c",
                    user: b"0",
                },
                b"/d",
            )),
        ),
    ];
    for (name, request) in expected {
        assert_eq!(request::decode(payload(&f(name)).2), Ok(request), "{name}");
    }
    assert_eq!(request::decode_hello(payload(&f("hello")).2), Ok(1));
    assert_eq!(payload(&f("data")), (Kind::Data, u32::MAX, &b"bytes"[..]));
    assert_eq!(frame::parse_ack(payload(&f("ack")).2), Some((2, 1 << 33)));
    assert_eq!(frame::parse_credit(payload(&f("credit")).2), Some(65536));
}

/// What chronus sends has exactly the bytes that the host's tests decode.
#[test]
fn guest_payloads() {
    let v = load();
    let p = |name: &str| bytes(&v, "guest_payloads", name);
    let mut out = Vec::new();
    request::put_hello(&mut out, "0.1.0", "0011223344556677");
    assert_eq!(out, p("hello"));
    out.clear();
    request::put_error(&mut out, Code::NotFound, "no such command");
    assert_eq!(out, p("error"));
    out.clear();
    let mut exit = Exit {
        code: 137,
        signal: 9,
        timed_out: true,
        start_error: None,
        duration_us: 2_000_000,
        cpu_us: 1500,
        peak_bytes: 1 << 20,
        offsets: (70_000, 3),
    };
    exit.put(&mut out);
    assert_eq!(out, p("exit"));
    out.clear();
    exit = Exit {
        code: 127,
        start_error: Some("no such file".into()),
        duration_us: 10,
        cpu_us: 20,
        peak_bytes: 30,
        offsets: (0, 40),
        ..Exit::default()
    };
    exit.put(&mut out);
    assert_eq!(out, p("exit_not_started"));
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Random bytes, and valid requests with random changes, never panic and never ask for more than they hold.
#[test]
fn decoding_survives_anything() {
    let v = load();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let seeds: Vec<Vec<u8>> = v["host_frames"]
        .keys()
        .map(|name| bytes(&v, "host_frames", name))
        .collect();
    for round in 0..200_000u32 {
        let mut data = if round % 4 == 0 {
            (0..random.next() % 64).map(|_| random.next() as u8).collect()
        } else {
            seeds[random.next() as usize % seeds.len()].clone()
        };
        for _ in 0..random.next() % 4 {
            if !data.is_empty() {
                let at = random.next() as usize % data.len();
                data[at] = random.next() as u8;
            }
        }
        data.truncate(random.next() as usize % (data.len() + 8));
        if let Ok(Some(header)) = frame::parse(&data) {
            assert!(header.len <= header.kind.max_payload());
        }
        let body = data.get(HEADER..).unwrap_or(&[]);
        let _ = request::decode(body);
        let _ = request::decode(&data);
        let _ = request::decode_hello(body);
    }
}

/// Sizes over the limit of their kind are refused before anything is kept.
#[test]
fn limits_of_frames() {
    for kind in 0..=255u8 {
        let mut head = vec![0; HEADER];
        head[4] = kind;
        match Kind::from_u8(kind) {
            None => assert!(frame::parse(&head).is_err()),
            Some(kind) => {
                let limit = kind.max_payload() as u32;
                head[..4].copy_from_slice(&limit.to_le_bytes());
                assert!(frame::parse(&head).unwrap().is_some());
                head[..4].copy_from_slice(&(limit + 1).to_le_bytes());
                assert!(frame::parse(&head).is_err());
            }
        }
    }
}
