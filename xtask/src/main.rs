//! Developer commands.
use trialrun_engine::*;
use trialrun_model::*;
use trialrun_policy::Policy;
fn main() -> anyhow::Result<()> {
    if std::env::args().nth(1).is_some_and(|a| a == "__keeper") { return Ok(trialrun_keeper::main()?); }
    let rt = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    rt.block_on(async {
        let config = Config { data_dir: "/tmp/tr/data".into(), cache_dir: "/tmp/tr/cache".into(), keeper: (std::env::current_exe()?, vec!["__keeper".into()]),
            guest: Guest::Embedded { program: trialrun_embedded::GUEST, digest: trialrun_embedded::GUEST_DIGEST } };
        let engine = Engine::open(config)?;
        engine.keep_warm();
        let args: Vec<String> = std::env::args().skip(1).collect();
        let n: usize = std::env::var("N").ok().and_then(|v| v.parse().ok()).unwrap_or(1);
        let mut firsts = vec![];
        for _ in 0..n {
        let t = std::time::Instant::now();
        let spec = SandboxSpec { image: std::env::var("IMAGE").unwrap_or("host".into()).parse()?, ..Default::default() };
        let sb = engine.create(CreateOptions { spec, policy: Policy::off(), attached: true, lease: None }).await?;
        let created = t.elapsed();
        let c = sb.capture(ExecSpec::new(Command::argv(args.clone())), 1 << 20).await?;
        let done = t.elapsed();
        if n == 1 {
        println!("{}", String::from_utf8_lossy(&c.stdout)); eprintln!("{}", String::from_utf8_lossy(&c.stderr));
        println!("{:?}", c.outcome); println!("{:?}", sb.isolation());
        for _ in 0..5 { let t=std::time::Instant::now(); sb.capture(ExecSpec::new(Command::argv(["/bin/true"])), 1 << 20).await?; println!("true {:?}", t.elapsed()); }
        let d = sb.describe().await?; println!("keeper {} agent {}", d.keeper_private_bytes, d.agent_private_bytes);
        println!("{:?}", sb.usage().await?);
        }
        let tm = sb.timings();
        let t2 = std::time::Instant::now();
        sb.delete().await?;
        println!("create {created:?} first {done:?} delete {:?} {tm:?}", t2.elapsed());
        firsts.push(done.as_secs_f64()*1e3);
        }
        firsts.sort_by(f64::total_cmp); println!("median {:.2}", firsts[firsts.len()/2]);
        Ok(())
    })
}
