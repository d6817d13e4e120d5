//! Pack a tree as tar.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io::Read;

use super::dir::{Dir, Stat};
use super::tar_format::{self, Kind, Member};
use super::trees::{check_depth, join};
use super::{Answer, At, Out, Result};

struct Packer {
    out: Out,
    buf: Vec<u8>,
    /// First member of each file that has several names.
    links: HashMap<(u64, u64), Vec<u8>>,
}

/// Stream `path` and all below it; names are relative to it. A file alone is one member.
pub fn pack(path: &[u8]) -> Result<Answer> {
    let mut packer = Packer {
        out: Out::default(),
        buf: vec![0; 64 * 1024],
        links: HashMap::new(),
    };
    match Dir::open(path) {
        Ok(dir) => {
            let stat = dir.stat_self().at(path)?;
            packer.header(&member(b"./", Kind::Dir, &stat));
            packer.tree(&dir, b"", 0)?;
        }
        Err(e) if e.raw_os_error() == Some(libc::ENOTDIR) => {
            let (parent, name) = Dir::parent_of(path).at(path)?;
            packer.entry(&parent, &name, name.as_bytes(), 0)?;
        }
        Err(e) => return Err(e).at(path),
    }
    packer.out.data(&[0; 2 * tar_format::BLOCK]);
    packer.out.flush();
    Ok(Answer::Done)
}

fn member(path: &[u8], kind: Kind, stat: &Stat) -> Member {
    Member {
        path: path.to_vec(),
        kind,
        mode: stat.mode(),
        uid: u64::from(stat.0.st_uid),
        gid: u64::from(stat.0.st_gid),
        size: 0,
        mtime: (stat.0.st_mtime, stat.0.st_mtime_nsec),
        link: Vec::new(),
        device: (0, 0),
    }
}

impl Packer {
    fn header(&mut self, member: &Member) {
        let mut bytes = Vec::new();
        tar_format::put_header(&mut bytes, member);
        self.out.data(&bytes);
    }

    fn tree(&mut self, dir: &Dir, path: &[u8], depth: usize) -> Result<()> {
        check_depth(depth, path)?;
        for name in dir.names().at(path)? {
            self.entry(dir, &name, &join(path, name.as_bytes()), depth)?;
        }
        Ok(())
    }

    fn entry(&mut self, dir: &Dir, name: &CStr, path: &[u8], depth: usize) -> Result<()> {
        // What has vanished in the meantime is not there.
        let Ok(stat) = dir.stat(name) else {
            return Ok(());
        };
        let kind = match stat.kind() {
            libc::S_IFDIR => Kind::Dir,
            libc::S_IFREG => Kind::File,
            libc::S_IFLNK => Kind::SymLink,
            libc::S_IFIFO => Kind::Fifo,
            libc::S_IFCHR => Kind::Char,
            libc::S_IFBLK => Kind::Block,
            // Sockets mean nothing outside.
            _ => return Ok(()),
        };
        let mut m = member(path, kind, &stat);
        if kind == Kind::Dir {
            m.path.push(b'/');
            let child = dir.child(name).at(path)?;
            self.header(&m);
            return self.tree(&child, path, depth + 1);
        }
        if stat.0.st_nlink > 1 {
            let first = self
                .links
                .entry((stat.0.st_dev, stat.0.st_ino))
                .or_insert_with(|| path.to_vec());
            if first != path {
                m.kind = Kind::HardLink;
                m.link.clone_from(first);
                self.header(&m);
                return Ok(());
            }
        }
        match kind {
            Kind::File => return self.file(dir, name, m),
            Kind::SymLink => m.link = dir.read_link(name).at(path)?,
            Kind::Char | Kind::Block => m.device = (libc::major(stat.0.st_rdev), libc::minor(stat.0.st_rdev)),
            _ => {}
        }
        self.header(&m);
        Ok(())
    }

    fn file(&mut self, dir: &Dir, name: &CStr, mut m: Member) -> Result<()> {
        let mut file = dir.file(name, libc::O_RDONLY, 0).at(&m.path)?;
        let stat = super::dir::stat_fd(&file).at(&m.path)?;
        if !stat.is_file() {
            return Ok(());
        }
        m.size = stat.0.st_size as u64;
        self.header(&m);
        let mut left = m.size;
        while left > 0 {
            let wanted = left.min(self.buf.len() as u64) as usize;
            // What a file loses while it is read is filled up: its header is already sent.
            let n = match file.read(&mut self.buf[..wanted]).at(&m.path)? {
                0 => {
                    self.buf[..wanted].fill(0);
                    wanted
                }
                n => n,
            };
            self.out.data(&self.buf[..n]);
            left -= n as u64;
        }
        self.out.data(&[0; tar_format::BLOCK][..tar_format::padding(m.size)]);
        Ok(())
    }
}
